"""On an NVIDIA GPU: a model with fused kernels answers as on the CPU, and a graph may hold them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sightline import LLM, SamplingParams
from sightline.layers.activation import Activation
from sightline.layers.linear import GateRoom, Unnormed
from sightline.layers.norm import HeadNorms, RmsNorm
from sightline.layers.operations import TurnedHeads
from sightline.layers.rotary import Halves, Rotary, RotarySpec
from sightline.llm import TokensPrompt
from support.layers import TORCH, make_table
from support.tiny_models import FAMILIES, make_model, random_prompts

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_with_fused_kernels_are_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    prompts: list[TokensPrompt] = [{"prompt_token_ids": prompt} for prompt in random_prompts([3, 40, 1, 17])]
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    answers = [
        [
            output.outputs[0].token_ids
            for output in LLM(
                str(tmp_path),
                skip_tokenizer_init=True,
                cache_tokens=2048,
                device=device,
                dtype="float32",
                layer_kernels=kernels,
                paranoid=True,
            ).generate(prompts, params, use_tqdm=False)
        ]
        for device, kernels in (("cpu", "torch"), ("cuda", "triton"))
    ]
    assert answers[1] == answers[0]


def test_heads_are_turned_in_a_captured_graph_that_other_tokens_replay() -> None:
    from sightline.layers.triton_operations import TritonOperations

    x, out = torch.randn(2, 5, 12, 128, device="cuda", dtype=torch.bfloat16)
    positions, spec, operations = torch.arange(5, device="cuda"), RotarySpec(128, 1e6), TritonOperations()
    norms = HeadNorms(*(RmsNorm(torch.rand(128, device="cuda"), 1e-6) for _ in range(2)))
    rotary, table = Rotary(spec, x.device), make_table(spec, positions, x.dtype, operations)

    def work() -> None:
        operations.rotary_table(rotary, positions, table)
        operations.turn_heads(TurnedHeads(x[:, :8], x[:, 8:], Halves.of(x), Halves.of(out)), norms, table)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    x.normal_()
    positions.add_(1000)
    out.fill_(torch.nan)
    graph.replay()
    given, expected = x.clone(), torch.empty_like(out)
    heads = TurnedHeads(given[:, :8], given[:, 8:], Halves.of(given), Halves.of(expected))
    TORCH.turn_heads(heads, norms, make_table(spec, positions, x.dtype))
    torch.testing.assert_close(out, expected, atol=2.0**-5, rtol=2.0**-6)


def replayed(given: Tensor, weights: Sequence[tuple[Tensor, Tensor]], norm: RmsNorm, *, overlaps: bool) -> list[Tensor]:
    """The stream behind a chain of feed-forwards in a captured graph, after each of some replays."""
    from sightline.layers.thin_linear import ThinLinear
    from sightline.layers.triton_operations import TritonOperations

    operations = TritonOperations(overlaps=overlaps)
    layers = [[ThinLinear(each, overlaps=overlaps) for each in pair] for pair in weights]
    stream, normed = given.clone(), torch.empty_like(given)
    gate_up = given.new_empty(given.shape[0], layers[0][0].out_features)
    gate, up = gate_up.chunk(2, dim=-1)
    room = GateRoom(gate_up, gate, up, gate.clone())

    def work() -> None:
        stream.copy_(given)
        for gate_up, down in layers:
            gate_up.gated_of_norm(Activation.SILU, Unnormed(stream, norm, normed), room, operations)
            down.add(room.gated, stream)

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    results = []
    for _ in range(20):
        graph.replay()
        results.append(stream.clone())
    return results


@pytest.mark.parametrize("rows", [1, 8, 24, 48])
def test_overlapping_launches_give_the_bits_of_launches_one_after_the_other(rows: int) -> None:
    """Every launch needs the one before: a launch that reads too early gives other numbers."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    hidden, size = 1024, 2816
    weights = [(random(2 * size, hidden) * 0.03, random(hidden, size) * 0.02) for _ in range(12)]
    norm, given = RmsNorm(torch.rand(hidden, device="cuda") + 0.5, 1e-6), random(rows, hidden)
    alone, *others = [each for overlaps in (False, True) for each in replayed(given, weights, norm, overlaps=overlaps)]
    assert alone.isfinite().all()
    assert not alone.equal(given)
    assert all(each.equal(alone) for each in others)
