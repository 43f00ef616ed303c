"""DeepSeek's models answer as transformers does, whichever way their attention goes, and however little room it has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import PreTrainedModel

from sightline import LLM, SamplingParams
from sightline.attention.backends.torch.latent_backend import TorchLatentBackend
from sightline.attention.latent.phases import Way
from sightline.core.config import EngineConfig
from sightline.llm import EngineSettings, TokensPrompt
from support.engines import is_at_rest
from support.tiny_models import (
    load_runtime,
    make_model,
    random_prompts,
    reference_logits,
    relative_error,
    stepped_logits,
)

TOLERANCE = 1e-4
KEY_BYTES = 6 * (10 + 8 + 12) * 4
"""Of the tiny models' heads."""
PAGE = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


FAMILIES = ("deepseek_v2", "deepseek_v3")


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    family = str(request.param)
    model, folder = make_model(family), tmp_path_factory.mktemp(family)
    model.save_pretrained(folder)
    return model, folder


def force(patch: pytest.MonkeyPatch, way: Way | None, room: int | None) -> None:
    """One way for every row, and room for so many keys."""
    if way is not None:
        patch.setattr(TorchLatentBackend, "choose", staticmethod(lambda spec, span, room: way))
    if room is not None:
        patch.setattr(TorchLatentBackend, "room_bytes", room * KEY_BYTES)


def tiny(folder: Path, **changes: object) -> LLM:
    settings = {"skip_tokenizer_init": True, "cache_tokens": 1024, "page_size": PAGE, "paranoid": True, **changes}
    return LLM(str(folder), **cast("EngineSettings", settings))


WAYS = [
    (None, None),
    (None, 5),
    (Way.ABSORBED, None),
    (Way.ONE_SHOT, None),
    (Way.CHUNKED, None),
    (Way.CHUNKED, PAGE),
    (Way.CHUNKED, 1),
]


def in_turn(ways: Sequence[tuple[Way | None, int | None]], others: Sequence[int]) -> list[object]:
    """Every way with every other value, and each of both with each family: every two together."""
    chosen = [
        (FAMILIES[(place + number) % 2], *way, other)
        for place, way in enumerate(ways)
        for number, other in enumerate(others)
    ]
    return [pytest.param(*each, id="-".join(str(getattr(part, "value", part)) for part in each)) for each in chosen]


@pytest.mark.parametrize(("made", "way", "room", "chunk"), in_turn(WAYS, [3, PAGE, 64]), indirect=["made"])
def test_every_way_gives_the_logits_of_transformers(
    made: tuple[PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch, way: Way | None, room: int | None, chunk: int
) -> None:
    model, folder = made
    force(monkeypatch, way, room)
    runtime = load_runtime(folder, EngineConfig(page_size=PAGE, cache_tokens=1024, max_num_seqs=8, dtype="float32"))
    lengths = (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 2)
    sequences = random_prompts([length + 8 for length in lengths])
    for sequence, length, got in zip(
        sequences, lengths, stepped_logits(runtime, sequences, lengths, chunk), strict=True
    ):
        assert relative_error(got, reference_logits(model, sequence)[length - 1 :]) <= TOLERANCE


@pytest.mark.parametrize(
    ("made", "way", "room", "prefix"),
    in_turn([(None, None), (None, 5), (Way.CHUNKED, PAGE)], [0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE]),
    indirect=["made"],
)
def test_answers_on_a_cached_prefix_are_those_of_transformers(
    made: tuple[PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch, way: Way | None, room: int | None, prefix: int
) -> None:
    model, folder = made
    force(monkeypatch, way, room)
    llm = tiny(folder, max_num_batched_tokens=2 * PAGE, max_num_seqs=4)
    first, second = random_prompts([6 * PAGE, 11], seed=prefix)
    prompt = first[:prefix] + second
    prompts = [TokensPrompt(prompt_token_ids=each) for each in (first, prompt)]
    for each in prompts:
        [output] = llm.generate([each], GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == prefix // PAGE * PAGE
    tokens = list(output.outputs[0].token_ids)
    logits = reference_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
    best = logits.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > 1e-3
    assert clear.sum() > 25
    assert torch.equal(logits.argmax(dim=-1)[clear], torch.tensor(tokens)[clear])
    assert is_at_rest(llm)


@pytest.mark.parametrize("room", [None, 7])
def test_answers_do_not_depend_on_cache_chunks_or_retractions(
    made: tuple[PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch, room: int | None
) -> None:
    _, folder = made
    force(monkeypatch, None, room)
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in random_prompts([9, 14, 3, 21, 6])]

    def ask(**changes: object) -> list[tuple[int, ...]]:
        llm = tiny(folder, **changes)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert is_at_rest(llm)
        return [output.outputs[0].token_ids for output in outputs]

    expected = ask(prefix_caching=False)
    assert ask() == expected
    assert ask(max_num_batched_tokens=5, max_num_seqs=3) == expected
    assert ask(cache_tokens=72, max_model_len=64, max_num_seqs=5) == expected
    assert ask(async_scheduling=True) == expected


def test_the_cache_holds_one_latent_and_one_rope_key_a_token_and_layer(made: tuple[PreTrainedModel, Path]) -> None:
    _, folder = made
    [pool] = tiny(folder).engine.runtime.store.pools
    entries = pool.allocator.num_usable + 1
    assert pool.num_bytes == 3 * entries * PAGE * (20 + 8) * 4
    assert pool.spec.entry_elements * 4 == 3 * (20 + 8) * 4


def test_a_prefix_of_any_length_needs_the_same_scratch_memory(
    made: tuple[PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = made
    force(monkeypatch, Way.CHUNKED, 16)
    sizes = []
    for length in (64, 256):
        llm = tiny(folder, max_model_len=length, cache_tokens=512, max_num_batched_tokens=32, max_num_seqs=2)
        workspace = llm.engine.runtime.workspace
        sizes.append(sum(entry.num_bytes for entry in workspace.ledger() if entry.name in ("keys", "values")))
        before = workspace.num_bytes
        [prompt] = random_prompts([length - 4])
        llm.generate(TokensPrompt(prompt_token_ids=prompt), SamplingParams(max_tokens=2), use_tqdm=False)
        assert workspace.num_bytes == before
    assert sizes[0] == sizes[1] == 16 * KEY_BYTES
