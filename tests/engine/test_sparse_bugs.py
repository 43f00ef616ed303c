"""Every bug in sparse attention is found by what an engine answers, or by an error before it does.

Answers are compared with transformers, token by token: a bug that changes a model in the same way in every step would
not show in engines alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from sightline import RequestOutput
from support.case_marks import routine
from support.sparse_bugs import SPARSE_BUGS, Plant, reverse_the_order_of_ties
from support.speculating import GREEDY, ask, tiny, tokens_of
from support.tiny_models import prompts_alike, random_prompts, reference_logits
from support.tiny_sparse import TOP_K, make_sparse

FAMILIES = ("glm_moe_dsa", "deepseek_v32")
PROMPTS = [*prompts_alike(14, 2, 5), *random_prompts([TOP_K, 2])]
"""Contexts below, at and above what an indexer chooses, some of which begin alike."""
PARAMS = replace(GREEDY, max_tokens=6, logprobs=1)
TOLERANCE = 1e-3
CRAMPED = {"cache_tokens": 56, "max_model_len": 48, "max_num_seqs": 4}


@dataclass(frozen=True)
class Family:
    """A saved model, and transformers' form of it."""

    folder: Path
    model: PreTrainedModel

    def assert_right(self, outputs: Sequence[RequestOutput], prompts: Sequence[list[int]]) -> None:
        """Fails unless every token is as likely as it should be, given those before it."""
        for output, prompt in zip(outputs, prompts, strict=True):
            [answer] = output.outputs
            logits = reference_logits(self.model, [*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
            expected = logits.log_softmax(dim=1).gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).squeeze(1)
            assert answer.logprobs is not None
            found = [scores[token].logprob for scores, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            torch.testing.assert_close(torch.tensor(found), expected, atol=TOLERANCE, rtol=0.0)


@pytest.fixture(scope="module")
def families(folders: Callable[[str], Path]) -> list[Family]:
    return [Family(folders(name), make_sparse(name)) for name in FAMILIES]


def workload(families: Sequence[Family]) -> None:
    """Chunks, prefixes and retraction, all of whose answers are known."""
    for family in families:
        llm = tiny(family.folder, max_num_batched_tokens=12, max_num_seqs=3)
        for _ in range(2):
            family.assert_right(ask(llm, PARAMS, PROMPTS), PROMPTS)
        assert llm.engine.metrics().prefix_cache_hits > 0
        # Alone, a row is dense first and then sparse.
        [short] = random_prompts([TOP_K - 2], seed=3)
        family.assert_right(ask(llm, PARAMS, [short]), [short])
    cramped = tiny(families[0].folder, **CRAMPED)
    families[0].assert_right(ask(cramped, PARAMS, PROMPTS), PROMPTS)


@pytest.mark.prove
def test_without_a_bug_every_answer_is_right(families: list[Family]) -> None:
    workload(families)


@pytest.mark.parametrize(
    "plant",
    routine(SPARSE_BUGS, "read_index_keys_of_a_stale_page", "turn_index_keys_in_the_other_order"),
)
def test_every_bug_is_found(families: list[Family], monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    plant(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - a wrong answer, or any error
        workload(families)


def without_weights(tmp_path: Path) -> Path:
    """A model whose indexers give every token the score 0."""
    model = make_sparse("glm_moe_dsa")
    for name, tensor in model.named_parameters():
        if name.endswith("weights_proj.weight"):
            tensor.data.zero_()
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.prove
@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_order_of_ties_shows_in_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_reversed: bool) -> None:
    folder, prompts = without_weights(tmp_path), random_prompts([30, 22])
    known = tiny(folder, attention_backend="reference-latent,reference-index", max_num_seqs=1)
    expected = tokens_of(ask(known, PARAMS, prompts))
    if is_reversed:
        reverse_the_order_of_ties(monkeypatch)
    found = tokens_of(ask(tiny(folder, max_num_batched_tokens=12), PARAMS, prompts))
    assert (found == expected) is not is_reversed
