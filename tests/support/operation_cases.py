"""What every kind of operations must compute: the same as torch in fp32, and nothing beside its rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sightline.layers.activation import Activation, ClampedSwiglu, Gate
from sightline.layers.norm import HeadNorms, LayerNorm, RmsNorm
from sightline.layers.operations import LatentRows, Operations, TurnedHeads
from sightline.layers.rotary import Halves, Rotary, RotarySpec, RotaryTable, YarnScaling
from support.layers import TORCH

LEFT, RIGHT = 3, 2
"""Elements beside each row, which nothing may read or write."""
YARN = YarnScaling(4.0, 32.0, 1.0, 1024, True, 1.25)
Run = Callable[[Operations, "Inputs"], list[Tensor]]
Check = Callable[[Run, torch.dtype, int], None]
"""Compares a run, in a dtype, of so many rows, with torch's."""
GATES: list[Gate] = [*Activation, ClampedSwiglu(alpha=1.7, limit=0.8)]

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
    @pytest.mark.parametrize("rows", [0, 1, 5])
    @pytest.mark.parametrize("spec", [RotarySpec(64, 1e4), RotarySpec(80, 1e6), RotarySpec(48, 1e4, YARN)], ids=repr)
    def test_rotary_table(self, check: Check, dtype: torch.dtype, rows: int, spec: RotarySpec) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            half = spec.head_dim // 2
            parts = [inputs.room(rows, size).unsqueeze(1) for size in (spec.head_dim, half, half)]
            positions = torch.tensor([0, 1, 7, 999, 131_071], device=inputs.device)[:rows]
            operations.rotary_table(Rotary(spec, inputs.device), positions, RotaryTable(*parts))
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
    def test_softcap(self, check: Check, rows: int) -> None:
        def run(operations: Operations, inputs: Inputs) -> list[Tensor]:
            logits = inputs.table(rows, 1111) * 40
            operations.softcap(logits, 30.0)
            return [logits]

        check(run, torch.float32, rows)
