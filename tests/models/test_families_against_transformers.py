"""Logits equal transformers' on the same weights, however a sequence is cut into steps and pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sightline.attention.spec import group_layers
from sightline.core.config import EngineConfig
from sightline.core.ledger import Ledger
from sightline.layers.rotary import RotarySpec
from sightline.models.decoder import Decoder, DecoderDefinition, DecoderLayer
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import define_model
from sightline.models.weights import WeightReader
from sightline.runner.batching import RowWork, assemble, assemble_transient
from sightline.runner.build import Runtime, assemble_runtime, select_backends
from support.attention_cases import BACKENDS, CPU
from support.tiny_models import (
    FAMILIES,
    load_runtime,
    make_model,
    random_prompts,
    reference_logits,
    stepped_logits,
)

TOLERANCE = 1e-4
"""Of the logits' scale."""
VISIBLE = 100 * TOLERANCE
DECODE_STEPS = 32
PROMPT_LENS = (5, 40, 1, 71, 16)

Models = dict[str, tuple[PreTrainedModel, Path]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        model = make_model(family)
        model.save_pretrained(folder)
        made[family] = (model, folder)
    return made


def config(backend: str = "torch", page_size: int = 16) -> EngineConfig:
    return EngineConfig(page_size=page_size, attention_backend=backend, cache_tokens=2048, max_num_seqs=8)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("chunk", [7, 64])
def test_stepped_logits_equal_a_full_forward(
    models: Models, family: str, backend: str, page_size: int, chunk: int
) -> None:
    model, folder = models[family]
    sequences = random_prompts([length + DECODE_STEPS for length in PROMPT_LENS])
    runtime = load_runtime(folder, config(backend, page_size))
    stepped = stepped_logits(runtime, sequences, PROMPT_LENS, chunk)
    for sequence, prompt_len, got in zip(sequences, PROMPT_LENS, stepped, strict=True):
        expected = reference_logits(model, sequence)[prompt_len - 1 :]
        assert got.shape == (DECODE_STEPS + 1, expected.shape[1])
        assert relative_error(got, expected) <= TOLERANCE
    assert runtime.planner.num_rebuilt == 0
    assert runtime.store.num_free_pages == runtime.store.num_usable_pages


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_transient_forward_equals_a_paged_one_and_leaves_the_pools_alone(
    models: Models, family: str, backend: str
) -> None:
    model, folder = models[family]
    runtime = load_runtime(folder, config(backend))
    prompts = random_prompts([9, 1, 33])
    batch = assemble_transient([RowWork(0, prompt, 0, True) for prompt in prompts], CPU)
    logits = runtime.runner.forward(runtime.planner.plan(batch))
    for prompt, got in zip(prompts, logits, strict=True):
        assert relative_error(got, reference_logits(model, prompt)[-1]) <= TOLERANCE
    assert all(pool.plane(name).isnan().all() for pool in runtime.store.pools for name in ("k", "v"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_idle_batch_gives_no_logits_and_touches_nothing(models: Models, family: str, backend: str) -> None:
    runtime = load_runtime(models[family][1], config(backend))
    logits = runtime.runner.forward(runtime.planner.plan(assemble([], runtime.store)))
    assert logits.shape == (0, runtime.definition.vocab_size)
    assert all(pool.plane(name).isnan().all() for pool in runtime.store.pools for name in ("k", "v"))


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_logits(models: Models, family: str) -> None:
    model, folder = models[family]
    runtime = load_runtime(folder, config())
    [prompt] = random_prompts([19])
    row = runtime.store.open_row()
    runtime.store.grow_row(row, 19)
    batch = assemble([RowWork(row, prompt, 0, True)], runtime.store).pad(5, 32)
    logits = runtime.runner.forward(runtime.planner.plan(batch))
    assert relative_error(logits[0], reference_logits(model, prompt)[-1]) <= TOLERANCE


def test_planning_again_inside_a_forward_leaves_buffers_that_planning_can_use(models: Models) -> None:
    runtime = load_runtime(models["llama"][1], config())
    rows = [runtime.store.open_row(), runtime.store.open_row()]
    prompts = random_prompts([9, 30])
    for row, prompt in zip(rows, prompts, strict=True):
        runtime.store.grow_row(row, len(prompt))
    batches = [
        assemble([RowWork(row, prompt, 0, True)], runtime.store) for row, prompt in zip(rows, prompts, strict=True)
    ]
    early = runtime.planner.plan(batches[0])
    late = runtime.planner.plan(batches[1])
    first = runtime.runner.forward(early)
    second = runtime.runner.forward(late)
    assert runtime.planner.num_rebuilt == 2
    torch.testing.assert_close(runtime.runner.forward(runtime.planner.plan(batches[0])), first)
    torch.testing.assert_close(runtime.runner.forward(runtime.planner.plan(batches[1])), second)


def test_gemma3s_alternating_windows_are_two_groups(models: Models) -> None:
    runtime = load_runtime(models["gemma3"][1], config())
    assert [binding.group.layers for binding in runtime.bindings] == [(0, 2, 3), (1,)]
    assert [binding.group.spec.window for binding in runtime.bindings] == [10, None]


def _each_rotary(change: Callable[[RotarySpec], RotarySpec]) -> Callable[[DecoderDefinition], DecoderDefinition]:
    return lambda definition: replace(
        definition, layers=tuple(replace(layer, rotary=change(layer.rotary)) for layer in definition.layers)
    )


def _each_layer(change: Callable[[DecoderLayer], DecoderLayer]) -> Callable[[Decoder], Decoder]:
    return lambda decoder: replace(decoder, layers=tuple(change(layer) for layer in decoder.layers))


def _same(definition: DecoderDefinition) -> DecoderDefinition:
    return definition


def _keep(decoder: Decoder) -> Decoder:
    return decoder


Change = tuple[str, Callable[[DecoderDefinition], DecoderDefinition], Callable[[Decoder], Decoder]]


def _without_bias(layer: DecoderLayer) -> DecoderLayer:
    return replace(layer, attention=replace(layer.attention, qkv=replace(layer.attention.qkv, bias=None)))


def _without_mlp_bias(layer: DecoderLayer) -> DecoderLayer:
    return replace(layer, mlp=replace(layer.mlp, down=replace(layer.mlp.down, bias=None)))


COMMON: list[Change] = [
    ("rotary base", _each_rotary(lambda rotary: replace(rotary, theta=rotary.theta * 10)), _keep),
    (
        "score scale",
        lambda d: replace(d, layers=tuple(replace(x, attention=replace(x.attention, scale=1.0)) for x in d.layers)),
        _keep,
    ),
    ("norm epsilon", lambda d: replace(d, norm_epsilon=0.5), _keep),
]
FEATURES: dict[str, list[Change]] = {
    "llama": [*COMMON, ("attention bias", _same, _each_layer(_without_bias))],
    "llama3": [
        *COMMON,
        ("rope scaling", _each_rotary(lambda rotary: replace(rotary, scaling=None)), _keep),
        ("mlp bias", _same, _each_layer(_without_mlp_bias)),
    ],
    "gemma3": [
        *COMMON,
        (
            "window",
            lambda d: replace(
                d, layers=tuple(replace(x, attention=replace(x.attention, window=None)) for x in d.layers)
            ),
            _keep,
        ),
        (
            "window by one",
            lambda d: replace(
                d,
                layers=tuple(
                    replace(x, attention=replace(x.attention, window=x.attention.window and x.attention.window + 1))
                    for x in d.layers
                ),
            ),
            _keep,
        ),
        ("rope scaling", _each_rotary(lambda rotary: replace(rotary, scaling=None)), _keep),
        ("norm offset", lambda d: replace(d, norm_offset=0.0), _keep),
        ("embedding scale", lambda d: replace(d, embedding_scale=1.0), _keep),
        ("logit softcap", lambda d: replace(d, logit_softcap=None), _keep),
        (
            "query and key norms",
            _same,
            _each_layer(lambda x: replace(x, attention=replace(x.attention, q_norm=None, k_norm=None))),
        ),
        ("norm after attention", _same, _each_layer(lambda x: replace(x, attention_out_norm=None))),
        ("norm after feed-forward", _same, _each_layer(lambda x: replace(x, mlp_out_norm=None))),
    ],
}


def _changed_runtime(folder: Path, change: Change) -> Runtime:
    """A runtime for the same weights with one feature disabled."""
    _, change_definition, change_decoder = change
    ledger = Ledger()
    checkpoint = open_checkpoint(folder, ledger)
    base = load_runtime(folder, config())
    original = define_model(checkpoint.config, ledger)
    assert isinstance(original, DecoderDefinition)
    definition = change_definition(original)
    decoder = change_decoder(definition.load(WeightReader(checkpoint, torch.float32, CPU, lambda done, total: None)))
    decoder = replace(
        decoder,
        layers=tuple(
            replace(layer, attention=replace(layer.attention, spec=described.attention))
            for layer, described in zip(decoder.layers, definition.layers, strict=True)
        ),
    )
    groups = group_layers(definition.attention_specs())
    selections = select_backends(base.config, groups, [selection.candidate for selection in base.selections[:1]])
    return assemble_runtime(base.config, definition, decoder, groups, selections)


@pytest.mark.parametrize(
    ("family", "change"),
    [(family, change) for family, changes in FEATURES.items() for change in changes],
    ids=[f"{family}-{change[0]}" for family, changes in FEATURES.items() for change in changes],
)
def test_disabling_a_feature_would_be_seen(models: Models, family: str, change: Change) -> None:
    model, folder = models[family]
    [sequence] = random_prompts([48])
    [got] = stepped_logits(_changed_runtime(folder, change), [sequence], [20], chunk=64)
    assert relative_error(got, reference_logits(model, sequence)[19:]) >= VISIBLE
