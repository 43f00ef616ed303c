"""Operations of residual streams and tails give the same with every kind of kernels and in half precision, and touch
nothing else."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from sightline.layers.norm import RmsNorm
from sightline.layers.operations import Operations
from sightline.layers.rotary import Rotary, RotarySpec, WindowTable
from sightline.layers.stream_mix import StreamMix, StreamRule, StreamShares
from support.attention_cases import CPU
from support.extend_cases import DEVICE
from support.layers import TORCH
from support.operation_cases import Inputs, Run, compare, table_of

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
RULE = StreamRule(3, num_rounds=4, epsilon=1e-3, norm_epsilon=1e-2)
both_dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


KINDS: dict[str, Operations] = {"torch": TORCH}
if find_spec("triton") is not None:
    from sightline.layers.triton_operations import TritonOperations

    KINDS["triton"] = TritonOperations()
every_kind = pytest.mark.parametrize("kind", KINDS)


def check(run: Run, dtype: torch.dtype, kind: str) -> None:
    compare(run, KINDS[kind], dtype, TOLERANCE[dtype], CPU if kind == "torch" else DEVICE)


@every_kind
@both_dtypes
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_tails_are_turned_in_place(dtype: torch.dtype, rows: int, normed: bool, back: bool, kind: str) -> None:
    def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
        x, table = inputs.given(rows, 4 * 12), table_of(inputs, rows, 8)
        norm = RmsNorm(inputs.weight(12), 1e-2) if normed else None
        heads = x.view(rows, 4, 12)
        still = heads[..., :4].clone()
        operations.turn_tails(heads, norm, table, back=back)
        assert normed or torch.equal(heads[..., :4], still)
        return [x]

    check(run, dtype, kind)


def test_turning_back_undoes_turning() -> None:
    spec, x = RotarySpec(8, 100.0), torch.randn(5, 2, 12, generator=torch.Generator().manual_seed(1))
    inputs = Inputs(torch.float32, torch.float32, CPU)
    table = table_of(inputs, 5, 8)
    TORCH.rotary_table(Rotary(spec, CPU), torch.arange(5) * 7, table)
    turned = x.clone()
    TORCH.turn_tails(turned, None, table)
    assert not torch.isclose(turned[1:, :, 4:], x[1:, :, 4:]).all()
    TORCH.turn_tails(turned, None, table, back=True)
    torch.testing.assert_close(turned, x)


def test_windows_know_the_place_of_a_token_and_the_rotation_of_their_first_one() -> None:
    spec, positions = RotarySpec(6, 100.0, window=4), torch.tensor([0, 3, 4, 9, 4_000_003])
    rotary = Rotary(spec, CPU)
    table = WindowTable(torch.empty(5, dtype=torch.int64), torch.empty(5, 3), torch.empty(5, 3))
    TORCH.window_table(rotary, positions, 4, table)
    assert table.places.tolist() == [0, 3, 0, 1, 3]
    angles = torch.tensor([0.0, 0.0, 4.0, 8.0, 4_000_000.0])[:, None] * rotary.frequencies
    torch.testing.assert_close(table.cos, angles.cos())
    torch.testing.assert_close(table.sin, angles.sin())


def test_gates_get_the_bias_of_their_place_in_fp32() -> None:
    x, bias = torch.randn(3, 4).bfloat16(), torch.randn(2, 4)
    out = torch.empty(3, 4)
    TORCH.add_places(x, bias, torch.tensor([1, 0, 1]), out)
    assert torch.equal(out, x.float() + bias[[1, 0, 1]])


@every_kind
@both_dtypes
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_streams_are_read_written_and_joined(dtype: torch.dtype, rows: int, kind: str) -> None:
    def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
        streams = inputs.table(rows, 3 * 8).view(rows, 3, 8)
        mix = StreamMix(RULE, inputs.weight(3), inputs.weight(15))
        shares = StreamShares(*(torch.empty(rows, *size, device=inputs.device) for size in ((3,), (3, 3))))
        out, joined, result = inputs.room(rows, 8), inputs.room(rows, 8), inputs.given(rows, 8)
        operations.collapse_streams(streams, inputs.weight(rows, 15), mix, shares, out)
        operations.expand_streams(result, shares, streams)
        head = StreamMix(RULE, inputs.weight(1), inputs.weight(3))
        operations.join_streams(streams, inputs.weight(rows, 3), head, joined)
        # Each stream is given as much as it gives.
        torch.testing.assert_close(shares.mixing.sum(dim=1), torch.ones_like(shares.writing), atol=5e-3, rtol=0)
        return [out, streams.flatten(1), joined]

    check(run, dtype, kind)
