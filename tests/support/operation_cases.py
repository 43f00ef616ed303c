"""What every kind of operations must compute: the same as torch in fp32, and nothing beside its rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sightline.layers.activation import Activation, ClampedSilu, ClampedSwiglu, Gate
from sightline.layers.decay_rates import DecayRates
from sightline.layers.norm import GroupNorm, HeadNorms, LayerNorm, RmsNorm
from sightline.layers.operations import HEAD_GATES, IndexRows, LatentRows, Operations, TurnedHeads
from sightline.layers.rotary import Halves, Rotary, RotarySpec, RotaryTable, YarnScaling
from sightline.layers.time_steps import TimeSteps
from support.layers import TORCH

LEFT, RIGHT = 3, 2
"""Elements beside each row, which nothing may read or write."""
YARN = YarnScaling(4.0, 32.0, 1.0, 1024, True, 1.25)
Run = Callable[[Operations, "Inputs"], list[Tensor]]
Check = Callable[[Run, torch.dtype, int], None]
"""Compares a run, in a dtype, of so many rows, with torch's."""
GATES: list[Gate] = [*Activation, ClampedSwiglu(alpha=1.7, limit=0.8), ClampedSilu(limit=0.8)]

all_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.prove)], ids=str
)
shapes = pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1), (1, 1030), (3, 33), (2, 64)])


class Inputs:
    """Tensors in the dtype of one run; their values are the same in every run, and exact in `coarse`."""

    def __init__(self, dtype: torch.dtype, coarse: torch.dtype, device: torch.device) -> None:
        self.dtype, self._coarse, self.device = dtype, coarse, device
        self._generator = torch.Generator().manual_seed(7)
        self.slices: list[Tensor] = []

    def weight(self, *shape: int) -> Tensor:
        """In fp32, as norms have them."""
        return torch.randn(shape, generator=self._generator).to(self.device)

    def table(self, *shape: int) -> Tensor:
        return self.weight(*shape).to(self._coarse).to(self.dtype)

    def given(self, rows: int, size: int) -> Tensor:
        """A slice of a wider buffer."""
        return self._slice(self.table(rows, size))

    def room(self, rows: int, size: int) -> Tensor:
        """A slice for results, of NaN."""
        return self._slice(torch.full((rows, size), torch.nan))

    def _slice(self, values: Tensor) -> Tensor:
        rows, size = values.shape
        wide = torch.full((rows, LEFT + size + RIGHT), torch.nan, dtype=self.dtype, device=self.device)
        wide[:, LEFT : LEFT + size] = values
        self.slices.append(wide)
        return wide[:, LEFT : LEFT + size]


def compare(run: Run, operations: Operations, dtype: torch.dtype, tolerance: float, device: torch.device) -> None:
    """Compares a run with torch's in fp32, and looks whether anything beside its slices was written."""
    wanted = run(TORCH, Inputs(torch.float32, dtype, device))
    inputs = Inputs(dtype, dtype, device)
    got = run(operations, inputs)
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.float(), theirs, atol=tolerance, rtol=tolerance)
    for wide in inputs.slices:
        assert wide[:, :LEFT].isnan().all()
        assert wide[:, -RIGHT:].isnan().all()


def table_of(inputs: Inputs, rows: int, head_dim: int) -> RotaryTable:
    """Any numbers: that they are cosines and sines does not matter to a rotation."""
    half, sin = inputs.table(rows, head_dim // 2), inputs.table(rows, head_dim // 2)
    return RotaryTable(torch.cat((half, half), dim=-1).unsqueeze(1), sin.unsqueeze(1), -sin.unsqueeze(1))


class OperationCases:
    """The tests of an implementation: its module has a fixture `check`."""

    @all_dtypes
    @shapes
    def test_norm(self, check: Check, dtype: torch.dtype, rows: int, size: int) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            x, out = inputs.given(rows, size), inputs.room(rows, size)
            operations.norm(x, RmsNorm(inputs.weight(size), 1e-2), out)
            return [out, x]

        check(run, dtype, rows)

    @all_dtypes
    def test_norm_in_place(self, check: Check, dtype: torch.dtype) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            x = inputs.given(4, 70)
            operations.norm(x, RmsNorm(inputs.weight(70), 1e-6), x)
            return [x]

        check(run, dtype, 4)

    @all_dtypes
    @pytest.mark.parametrize("wanted", [[], [2], [4, 0, 0]])
    def test_norm_of_some_rows(self, check: Check, dtype: torch.dtype, wanted: list[int]) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            x, norm = inputs.given(5, 48), RmsNorm(inputs.weight(48), 1e-6)
            out = torch.full((len(wanted), 48), torch.nan, dtype=inputs.dtype, device=inputs.device)
            operations.norm_rows(x, torch.tensor(wanted, dtype=torch.int64, device=inputs.device), norm, out)
            return [out]

        check(run, dtype, len(wanted))

    @all_dtypes
    @shapes
    def test_the_norm_of_a_result_is_added(self, check: Check, dtype: torch.dtype, rows: int, size: int) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            result, stream = inputs.given(rows, size), inputs.given(rows, size)
            operations.add_normed(result, RmsNorm(inputs.weight(size), 1e-2), stream)
            return [stream]

        check(run, dtype, rows)

    @all_dtypes
    @shapes
    def test_the_norm_of_a_result_is_added_and_the_stream_normalised(
        self, check: Check, dtype: torch.dtype, rows: int, size: int
    ) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            result, stream, out = inputs.given(rows, size), inputs.given(rows, size), inputs.room(rows, size)
            norm, next_norm = RmsNorm(inputs.weight(size), 1e-2), RmsNorm(inputs.weight(size), 0.5)
            operations.add_normed_then_norm(result, norm, stream, next_norm, out)
            return [stream, out]

        check(run, dtype, rows)

    @all_dtypes
    @shapes
    def test_layer_norm(self, check: Check, dtype: torch.dtype, rows: int, size: int) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            x, out = inputs.given(rows, size), inputs.room(rows, size)
            operations.layer_norm(x, LayerNorm(inputs.weight(size), inputs.weight(size), 1e-2), out)
            return [out, x]

        check(run, dtype, rows)

    @all_dtypes
    @pytest.mark.parametrize("normed", [False, True])
    @pytest.mark.parametrize(
        ("rows", "q_heads", "kv_heads", "head_dim"),
        [(0, 3, 1, 64), (1, 3, 1, 64), (3, 9, 3, 64), (3, 5, 2, 80), (2, 4, 4, 96), (3, 8, 2, 128), (2, 3, 1, 256)],
    )
    def test_heads(
        self, check: Check, dtype: torch.dtype, normed: bool, rows: int, q_heads: int, kv_heads: int, head_dim: int
    ) -> None:
        turned, num_heads = q_heads + kv_heads, q_heads + 2 * kv_heads

        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            qkv, table = inputs.given(rows, num_heads * head_dim), table_of(inputs, rows, head_dim)
            heads = qkv.view(rows, num_heads, head_dim)
            rotated = inputs.room(rows, turned * head_dim).view(rows, turned, head_dim)
            norms = HeadNorms(RmsNorm(inputs.weight(head_dim), 1e-3), RmsNorm(inputs.weight(head_dim), 1.0))
            parts = TurnedHeads(
                heads[:, :q_heads], heads[:, q_heads:turned], Halves.of(heads[:, :turned]), Halves.of(rotated)
            )
            values = heads[:, turned:].clone()
            operations.turn_heads(parts, norms if normed else None, table)
            assert torch.equal(heads[:, turned:], values)
            return [rotated]

        check(run, dtype, rows)

    @all_dtypes
    @pytest.mark.parametrize("low_rank", [False, True])
    @pytest.mark.parametrize(
        ("rows", "heads", "rope", "latent"), [(0, 2, 8, 16), (1, 2, 64, 512), (3, 16, 64, 96), (3, 7, 24, 33)]
    )
    def test_latents(
        self, check: Check, dtype: torch.dtype, low_rank: bool, rows: int, heads: int, rope: int, latent: int
    ) -> None:
        nope = 5 * heads

        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            side = 11 if low_rank else nope + heads * rope
            down = inputs.given(rows, side + rope + latent)
            queries = inputs.given(rows, nope + (heads + 1) * rope) if low_rank else down[:, : side + rope]
            if low_rank:
                queries[:, -rope:] = torch.nan
            rotated = inputs.room(rows, (heads + 1) * rope).view(rows, heads + 1, rope)
            parts = LatentRows(
                unnormed=down[:, side + rope :],
                latent=inputs.room(rows, latent),
                k_rope=down[:, side : side + rope],
                turned=Halves.of(queries[:, nope:].view(rows, heads + 1, rope)),
                k_rope_room=queries[:, -rope:] if low_rank else None,
                rotated=Halves.of(rotated),
            )
            operations.turn_latents(parts, RmsNorm(inputs.weight(latent), 1e-3), table_of(inputs, rows, rope))
            return [parts.latent, rotated]

        check(run, dtype, rows)

    @all_dtypes
    @pytest.mark.parametrize(
        ("rows", "heads", "dim", "rope"), [(0, 2, 16, 8), (1, 64, 128, 64), (3, 9, 20, 6), (2, 3, 24, 24)]
    )
    def test_queries_and_key_of_an_indexer(
        self, check: Check, dtype: torch.dtype, rows: int, heads: int, dim: int, rope: int
    ) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            q, key = inputs.given(rows, heads * dim).view(rows, heads, dim), inputs.given(rows, dim)
            turned = inputs.room(rows, (heads + 1) * dim).view(rows, heads + 1, dim)
            norm = LayerNorm(inputs.weight(dim), inputs.weight(dim), 1e-2)
            operations.turn_index(IndexRows(q, key, turned), norm, table_of(inputs, rows, rope))
            return [turned]

        check(run, dtype, rows)

    def test_the_key_of_an_indexer_is_normalised_before_it_is_rotated(self, check: Check) -> None:
        """An oracle of its own: pairs of dimensions are complex numbers, and nothing else turns."""

        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            q, key = inputs.given(2, 3 * 10).view(2, 3, 10), inputs.given(2, 10)
            norm = LayerNorm(inputs.weight(10), inputs.weight(10), 1e-6)
            angles = torch.tensor([[[0.3, 1.1, -0.7]], [[2.0, 0.4, 0.9]]], dtype=torch.float64)
            cos, sin = (each.to(inputs.device, inputs.dtype) for each in (angles.cos(), angles.sin()))
            both = torch.cat((q, torch.nn.functional.layer_norm(key, (10,), norm.weight, norm.bias, 1e-6)[:, None]), 1)
            expected = both.clone()
            turned = torch.complex(both[..., :3].double(), both[..., 3:6].double()) * torch.polar(
                torch.ones_like(angles), angles
            ).to(inputs.device)
            expected[..., :3], expected[..., 3:6] = turned.real.float(), turned.imag.float()
            room = inputs.room(2, 40).view(2, 4, 10)
            table = RotaryTable(torch.cat((cos, cos), dim=-1), sin, -sin)
            operations.turn_index(IndexRows(q, key, room), norm, table)
            torch.testing.assert_close(room, expected, atol=1e-5, rtol=1e-5)
            return [room]

        check(run, torch.float32, 2)

    @all_dtypes
    @pytest.mark.parametrize("rows", [0, 1, 5])
    @pytest.mark.parametrize("spec", [RotarySpec(64, 1e4), RotarySpec(80, 1e6), RotarySpec(48, 1e4, YARN)], ids=repr)
    def test_rotary_table(self, check: Check, dtype: torch.dtype, rows: int, spec: RotarySpec) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            half = spec.head_dim // 2
            parts = [inputs.room(rows, size).unsqueeze(1) for size in (spec.head_dim, half, half)]
            positions = torch.tensor([0, 1, 7, 999, 131_071], device=inputs.device)[:rows]
            table = RotaryTable(parts[0], parts[1], parts[2])
            operations.rotary_table(Rotary(spec, inputs.device), positions, table)
            return parts

        check(run, dtype, rows)

    @all_dtypes
    @pytest.mark.parametrize("kind", GATES, ids=str)
    @pytest.mark.parametrize(("rows", "size"), [(0, 8), (2, 1030)])
    def test_gate(self, check: Check, dtype: torch.dtype, kind: Gate, rows: int, size: int) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            gate, up = inputs.given(rows, size).mul_(4), inputs.given(rows, size + 7)[:, 7:].mul_(4)
            out = inputs.room(rows, size)
            operations.gate(kind, gate, up, out)
            return [out]

        check(run, dtype, rows)

    @all_dtypes
    def test_gate_in_place(self, check: Check, dtype: torch.dtype) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            gate, up = inputs.given(2, 70), inputs.given(2, 70)
            operations.gate(Activation.SIGMOID, gate, up, up)
            return [up, gate]

        check(run, dtype, 2)

    @all_dtypes
    @pytest.mark.parametrize("kind", Activation)
    @pytest.mark.parametrize(("rows", "size"), [(0, 8), (2, 1030)])
    def test_activate(self, check: Check, dtype: torch.dtype, kind: Activation, rows: int, size: int) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            x = inputs.given(rows, size)
            operations.activate(kind, x)
            return [x]

        check(run, dtype, rows)

    @all_dtypes
    @pytest.mark.parametrize("scale", [1.0, 576**0.5])
    @shapes
    def test_embedding(self, check: Check, dtype: torch.dtype, scale: float, rows: int, size: int) -> None:
        exact = float(torch.tensor(scale, dtype=dtype))

        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            weight, out = inputs.table(9, size), inputs.room(rows, size)
            tokens = torch.tensor([8, 0, 3], device=inputs.device)[:rows]
            operations.embed(weight, tokens, exact if operations is TORCH else scale, out)
            return [out]

        check(run, dtype, rows)

    @all_dtypes
    @shapes
    def test_rows_of_a_table_are_added(self, check: Check, dtype: torch.dtype, rows: int, size: int) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            table, out = inputs.table(9, size), inputs.given(rows, size)
            operations.add_rows(table, torch.tensor([8, 0, 8], device=inputs.device)[:rows], out)
            return [out]

        check(run, dtype, rows)

    @pytest.mark.parametrize("rows", [0, 1, 3])
    def test_logits_are_multiplied(self, check: Check, rows: int) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            logits = inputs.table(rows, 1111)
            operations.scale(logits, 0.3)
            return [logits]

        check(run, torch.float32, rows)

    @pytest.mark.parametrize("rows", [0, 1, 3])
    def test_softcap(self, check: Check, rows: int) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            logits = inputs.table(rows, 1111) * 40
            operations.softcap(logits, 30.0)
            return [logits]

        check(run, torch.float32, rows)


class StateOperationCases:
    """The tests of the operations around recurrent states; the module or the class has a fixture `check`."""

    @all_dtypes
    @pytest.mark.parametrize("activation", HEAD_GATES)
    @pytest.mark.parametrize(("rows", "heads", "dim"), [(0, 2, 8), (1, 1, 1), (3, 5, 33), (2, 3, 128)])
    def test_gated_norm(
        self, check: Check, dtype: torch.dtype, activation: Activation, rows: int, heads: int, dim: int
    ) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            x, wide, out = (
                inputs.given(rows, heads * dim),
                inputs.given(rows, heads * 2 * dim).mul_(4),
                inputs.room(rows, heads * dim),
            )
            gate = wide.view(rows, heads, 2 * dim)[:, :, dim:]
            heads_of_x, heads_of_out = (each.view(rows, heads, dim) for each in (x, out))
            operations.gated_norm(heads_of_x, gate, RmsNorm(inputs.weight(dim), 1e-2), activation, heads_of_out)
            return [out, x, wide]

        check(run, dtype, rows)

    @all_dtypes
    def test_gated_norm_in_place(self, check: Check, dtype: torch.dtype) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            x, gate = (inputs.given(4, 3 * 24).view(4, 3, 24) for _ in range(2))
            operations.gated_norm(x, gate, RmsNorm(inputs.weight(24), 1e-6), Activation.SILU, x)
            return [x]

        check(run, dtype, 4)

    @all_dtypes
    @pytest.mark.parametrize("bound", [None, -5.0])
    @pytest.mark.parametrize(
        ("rows", "shape"), [(0, (4,)), (1, (1,)), (3, (5,)), (2, (1030,)), (0, (2, 3)), (3, (3, 33)), (2, (16, 128))]
    )
    def test_delta_gates(
        self, check: Check, dtype: torch.dtype, rows: int, shape: tuple[int, ...], bound: float | None
    ) -> None:
        """Some of the inputs are far from 0, where an exponential is infinite or 0."""
        size = math.prod(shape)

        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            x, shares = inputs.given(rows, size).mul_(8), inputs.given(rows, shape[0]).mul_(8)
            x[:, ::3].mul_(32)
            decay, beta = (torch.full((rows, *each), torch.nan, device=inputs.device) for each in (shape, shape[:1]))
            rates = DecayRates(inputs.weight(shape[0]), inputs.weight(*shape), bound)
            operations.delta_gates(x.view(rows, *shape), shares, rates, decay, beta)
            assert decay.dtype == beta.dtype == torch.float32
            assert bool(((decay <= 0.0) & (decay >= (-torch.inf if bound is None else bound))).all())
            assert bool(((beta >= 0.0) & (beta <= 1.0)).all())
            return [decay.to(inputs.dtype), beta.to(inputs.dtype), x, shares]

        check(run, dtype, rows)

    @all_dtypes
    @pytest.mark.parametrize(("rows", "heads"), [(0, 4), (1, 1), (3, 5), (2, 1030)])
    @pytest.mark.parametrize("limits", [(0.0, math.inf), (0.5, 4.0)])
    def test_time_steps(
        self, check: Check, dtype: torch.dtype, rows: int, heads: int, limits: tuple[float, float]
    ) -> None:
        """Some of the inputs are far from 0, where an exponential is infinite or 0."""

        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            x = inputs.given(rows, heads).mul_(8)
            x[:, ::3].mul_(32)
            times, decays = (torch.full((rows, heads), torch.nan, device=inputs.device) for _ in range(2))
            operations.time_steps(x, TimeSteps(inputs.weight(heads), inputs.weight(heads), *limits), times, decays)
            assert bool((times >= limits[0]).all())
            assert bool((times <= limits[1]).all())
            return [times.to(inputs.dtype), decays.to(inputs.dtype), x]

        check(run, dtype, rows)

    @all_dtypes
    @pytest.mark.parametrize(("rows", "groups", "size"), [(0, 2, 8), (1, 1, 1), (3, 5, 33), (2, 1, 1030), (2, 3, 128)])
    @pytest.mark.parametrize("in_place", [False, True])
    def test_norm_gated(
        self, check: Check, dtype: torch.dtype, rows: int, groups: int, size: int, in_place: bool
    ) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            x, gate = inputs.given(rows, groups * size), inputs.given(rows, groups * size).mul_(4)
            out = x if in_place else inputs.room(rows, groups * size)
            operations.norm_gated(x, gate, GroupNorm(inputs.weight(groups, size), 1e-2), out)
            return [out, gate]

        check(run, dtype, rows)

    @all_dtypes
    @shapes
    def test_multiply(self, check: Check, dtype: torch.dtype, rows: int, size: int) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            x, y, out = inputs.given(rows, size), inputs.given(rows, size), inputs.room(rows, size)
            operations.multiply(x, y, out)
            operations.multiply(x, y, x)
            return [out, x, y]

        check(run, dtype, rows)

    @all_dtypes
    @pytest.mark.parametrize(("rows", "heads", "dim"), [(0, 2, 8), (1, 1, 1), (3, 5, 33), (2, 3, 128)])
    def test_gate_heads(self, check: Check, dtype: torch.dtype, rows: int, heads: int, dim: int) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            gate, x = inputs.given(rows, heads).mul_(4), inputs.given(rows, heads * dim)
            operations.gate_heads(gate, x.view(rows, heads, dim))
            return [x, gate]

        check(run, dtype, rows)
