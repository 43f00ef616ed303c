"""Experts computed at once give what the same experts give one by one, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sightline.attention.groups import group_layers
from sightline.core.config import EngineConfig
from sightline.core.errors import CheckpointError
from sightline.core.ledger import Ledger
from sightline.kernels.cpu.program import inline_launcher
from sightline.kernels.triton.experts import StackedWeights
from sightline.layers.activation import Activation, ClampedSilu, ClampedSwiglu, Gate
from sightline.layers.linear import Linear
from sightline.layers.mlp import GatedMlp
from sightline.layers.moe import Expert, ExpertBank, ExpertCompute, ExpertMlp, SeparateExperts
from sightline.layers.routing import Groups, Routing, Score, Share
from sightline.layers.sink import Added, Sink, Written
from sightline.layers.source import Given
from sightline.layers.stacked_experts import StackedExperts
from sightline.layers.step_tokens import TokenBuffers
from sightline.models.decoder import Decoder
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import define_model
from sightline.models.weights import WeightReader
from sightline.runner.build import assemble_runtime, make_store
from support.layers import dense, experts_of, feed, scratch_for
from support.packed_experts import PACKED, pack_experts
from support.tiny_models import (
    load_runtime,
    make_model,
    random_prompts,
    reference_logits,
    relative_error,
    stepped_logits,
)

COMPUTES = (ExpertCompute.ONE_BY_ONE, ExpertCompute.AT_ONCE)
HIDDEN, SIZE, NUM_EXPERTS = 20, 12, 6
ROUTINGS = {
    "softmax": Routing(NUM_EXPERTS, 2, Share.OF_CHOSEN),
    "roots": Routing(NUM_EXPERTS, 3, Share.OF_CHOSEN, Score.SQRT_SOFTPLUS, corrected=True, scale=1.5),
    "groups": Routing(NUM_EXPERTS, 3, Share.OF_CHOSEN, Score.SIGMOID, Groups(3, 2, ranked_by=2), True, 2.5),
}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_layer(routing: Routing, gate: Gate, *, bias: bool) -> ExpertMlp:
    def linear(outputs: int, inputs: int, seed: int) -> Linear:
        return Linear(normal(outputs, inputs, seed=seed), normal(outputs, seed=seed + 1) if bias else None)

    experts = [
        Expert(linear(2 * SIZE, HIDDEN, 9 * i), linear(HIDDEN, SIZE, 9 * i + 4), gate) for i in range(NUM_EXPERTS)
    ]
    correction = normal(NUM_EXPERTS, seed=5) if routing.corrected else None
    return ExpertMlp(Linear(normal(NUM_EXPERTS, HIDDEN, seed=99)), routing, SeparateExperts(tuple(experts)), correction)


def at_once(layer: ExpertMlp) -> ExpertMlp:
    return replace(layer, bank=stacked_bank(layer))


def stacked_bank(layer: ExpertMlp) -> StackedExperts:
    experts = experts_of(layer)

    def stacked(projections: list[Linear]) -> StackedWeights:
        biases = [projection.bias for projection in projections if projection.bias is not None]
        return StackedWeights(
            torch.stack([each.weight for each in projections]), torch.stack(biases) if biases else None
        )

    gate_up, down = ([dense(getattr(each, name)) for each in experts] for name in ("gate_up", "down"))
    return StackedExperts(stacked(gate_up), stacked(down), experts[0].gate, overlaps=False)


@pytest.mark.parametrize(
    ("num_tokens", "sink"),
    [(1, Written), (9, Added), *(pytest.param(40, sink, marks=pytest.mark.prove) for sink in (Written, Added))],
)
@pytest.mark.parametrize(
    ("routing", "gate"),
    [("softmax", Activation.SILU), ("groups", ClampedSwiglu(alpha=1.7, limit=0.8)), ("roots", ClampedSilu(limit=0.8))],
)
def test_experts_at_once_equal_experts_one_by_one(num_tokens: int, sink: type[Sink], routing: str, gate: Gate) -> None:
    """With a shared feed-forward, and in both memory orders of activations: 9 and 40 tokens are feature-major."""
    shared = GatedMlp(Linear(normal(2 * 7, HIDDEN, seed=1)), Linear(normal(HIDDEN, 7, seed=2)), Activation.SILU)
    layer = replace(make_layer(ROUTINGS[routing], gate, bias=routing == "groups"), shared=shared)
    x, stream = normal(num_tokens, HIDDEN, seed=77), normal(HIDDEN, num_tokens, seed=78).t()
    expected = stream.clone()
    layer(Given(x), sink(expected), scratch_for(x))
    at_once(layer)(Given(x), sink(stream), scratch_for(x))
    torch.testing.assert_close(stream, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("compute", COMPUTES)
def test_parts_of_the_experts_add_up_to_all(compute: ExpertCompute, num_tokens: int) -> None:
    """As ranks hold them, over memory of parts that holds NaN."""
    layer, x = make_layer(ROUTINGS["groups"], Activation.SILU, bias=True), normal(num_tokens, HIDDEN, seed=77)
    expected, total = torch.empty(num_tokens, HIDDEN), torch.zeros(num_tokens, HIDDEN)
    layer(Given(x), Written(expected), scratch_for(x))
    for held in (range(2), range(2, 3), range(3, NUM_EXPERTS)):
        bank: ExpertBank = SeparateExperts(experts_of(layer)[held.start : held.stop], held)
        if compute is ExpertCompute.AT_ONCE:
            bank = replace(stacked_bank(replace(layer, bank=bank)), held=held)
        part, scratch = replace(layer, bank=bank), scratch_for(x)
        part.buffers(scratch)
        scratch.take("experts.parts", 3 * HIDDEN).fill_(torch.nan)
        part(Given(x), Added(total), scratch)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_listed_experts_at_once_equal_those_one_by_one(num_tokens: int) -> None:
    layer = make_layer(replace(ROUTINGS["roots"], corrected=False), ClampedSilu(limit=0.8), bias=False)
    listed = normal(11, NUM_EXPERTS, seed=3).argsort(dim=1)[:, :3]
    layer, x = replace(layer, listed=listed), normal(num_tokens, HIDDEN, seed=77)
    found = []
    for each in (layer, at_once(layer)):
        scratch, out = scratch_for(x), torch.empty(num_tokens, HIDDEN)
        each.buffers(scratch)
        scratch.of(TokenBuffers).tokens.copy_(torch.arange(num_tokens) * 5 % 11)
        each(Given(x), Written(out), scratch)
        found.append(out)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


class NanRouter(Linear):
    """A router whose logit of one expert is NaN for one token."""

    def __call__(self, x: Tensor, out: Tensor) -> None:
        super().__call__(x, out)
        out[3, NUM_EXPERTS - 1] = torch.nan


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("compute", COMPUTES)
def test_a_router_logit_that_is_nan_makes_the_output_of_its_token_nan_and_of_no_other(
    compute: ExpertCompute, routing: Routing
) -> None:
    layer = make_layer(routing, Activation.SILU, bias=False)
    layer = layer if compute is ExpertCompute.ONE_BY_ONE else at_once(layer)
    broken = replace(layer, router=NanRouter(dense(layer.router).weight))
    x = normal(6, HIDDEN, seed=7)
    expected, found = feed(layer, x), feed(broken, x)
    assert expected.isfinite().all()
    assert found[3].isnan().all()
    others = [0, 1, 2, 4, 5]
    torch.testing.assert_close(found[others], expected[others], rtol=1e-4, atol=1e-4)


def test_no_step_leases_more_than_was_reserved() -> None:
    layer = at_once(make_layer(ROUTINGS["softmax"], Activation.SILU, bias=False))
    scratch = scratch_for(normal(5, HIDDEN, seed=1))
    layer.buffers(scratch)
    scratch._activations._workspace.seal()
    x, out = normal(5, HIDDEN, seed=1), torch.empty(5, HIDDEN)
    layer(Given(x), Written(out), scratch)
    assert out.isfinite().all()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", pytest.param("deepseek_v3", marks=pytest.mark.prove)])
def test_both_storages_are_loaded_for_experts_at_once(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    one_by_one, stacked = (expert_layers(tmp_path, compute) for compute in COMPUTES)
    assert len(one_by_one) == len(stacked) > 0
    x = normal(3, dense(one_by_one[0].router).in_features, seed=6)
    for expected, got in zip(one_by_one, stacked, strict=True):
        assert isinstance(got.bank, StackedExperts)
        torch.testing.assert_close(feed(got, x), feed(expected, x), rtol=1e-4, atol=1e-4)


@pytest.mark.prove
@pytest.mark.parametrize("family", PACKED)
def test_packed_experts_stay_packed(family: str, tmp_path: Path) -> None:
    pack_experts(family, tmp_path)
    one_by_one, stacked = (expert_layers(tmp_path, compute) for compute in COMPUTES)
    x = normal(3, dense(one_by_one[0].router).in_features, seed=6) / 8
    for expected, got in zip(one_by_one, stacked, strict=True):
        assert isinstance(got.bank, StackedExperts)
        assert got.bank.gate_up.form is got.bank.down.form is PACKED[family]
        torch.testing.assert_close(feed(got, x), feed(expected, x), rtol=1e-4, atol=1e-4)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("family", "ending", "value"),
    [
        ("gpt_oss", "_scales", 255),
        ("deepseek_v3", "_scale_inv", torch.inf),
        ("deepseek_v3", "up_proj.weight", torch.nan),
    ],
)
def test_packed_experts_that_are_not_finite_are_refused(family: str, ending: str, value: float, tmp_path: Path) -> None:
    pack_experts(family, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if ".experts." in name and name.endswith(ending))
    tensors[name].flatten()[5 % tensors[name].numel()] = value
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="expected finite numbers"):
        expert_layers(tmp_path, ExpertCompute.AT_ONCE)


def expert_layers(folder: Path, compute: ExpertCompute) -> list[ExpertMlp]:
    layers = load_decoder(folder, compute).states.layers
    return [layer.mlp for layer in layers if isinstance(layer.mlp, ExpertMlp)]


def load_decoder(folder: Path, compute: ExpertCompute) -> Decoder:
    checkpoint = open_checkpoint(folder, Ledger())
    reader = WeightReader(
        checkpoint, torch.float32, torch.device("cpu"), Ledger(), lambda *_: None, expert_compute=compute
    )
    decoder = define_model(checkpoint.config, Ledger()).load(reader)
    assert isinstance(decoder, Decoder)
    return decoder


@pytest.mark.prove
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_model_with_experts_at_once_answers_as_transformers_does(family: str, tmp_path: Path) -> None:
    """Prefill in chunks, then decode."""
    model = make_model(family)
    model.save_pretrained(tmp_path)
    base = load_runtime(tmp_path, EngineConfig(cache_tokens=256))
    decoder = load_decoder(tmp_path, ExpertCompute.AT_ONCE)
    groups = group_layers(decoder.definition.attention_specs())
    runtime = assemble_runtime(
        base.config,
        decoder.definition,
        decoder,
        groups,
        base.selections,
        make_store(base.config, groups),
        inline_launcher(),
    )
    [sequence] = random_prompts([8])
    [got] = stepped_logits(runtime, [sequence], [7], chunk=6)
    assert relative_error(got, reference_logits(model, sequence)[6:]) <= 1e-4
