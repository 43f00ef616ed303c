"""Products of few rows: each equals the one in fp64, reads no neighbour and writes nothing beside its rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from sightline.kernels.triton.gates import GateKind, GateRule
from sightline.kernels.triton.thin_product import (
    MOST_ROWS,
    exact_product,
    fits_exact_product,
    fits_thin_product,
    thin_gated_product,
    thin_product,
)
from sightline.layers.activation import Activation
from sightline.layers.linear import GateRoom, Linear, Unnormed
from sightline.layers.norm import RmsNorm
from sightline.layers.thin_linear import ThinLinear
from support.case_marks import proofs
from support.expert_cases import gated
from support.extend_cases import DEVICE
from support.layers import TORCH
from support.product_cases import ProductCase

SHAPES = [(1, 16, 16), (3, 48, 272), (16, 40, 528), (16, 2064, 32), (20, 80, 272), (40, 48, 144)]
shapes = pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, *proofs(torch.float16)], ids=str)


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [*SHAPES, (3, 1, 272)])
@dtypes
@pytest.mark.parametrize("adds", [False, True], ids=["written", "added"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_products(rows: int, outputs: int, inputs: int, dtype: torch.dtype, *, adds: bool, has_bias: bool) -> None:
    case = ProductCase(rows, outputs, inputs, dtype)
    bias = case.bias if has_bias else None
    out, wide = case.room(outputs)
    if not adds:
        out.fill_(torch.nan)
    thin_product(case.x, case.weight, bias, out, adds=adds, overlaps=False)
    case.check(out, wide, case.expected(bias) + (1.0 if adds else 0.0))


@pytest.mark.prove
@shapes
@pytest.mark.parametrize("has_bias", [*proofs(False), True], ids=["", "bias"])
@pytest.mark.parametrize("kind", GateKind, ids=lambda kind: kind.name)
def test_gates(rows: int, outputs: int, inputs: int, kind: GateKind, *, has_bias: bool) -> None:
    case = ProductCase(rows, outputs, inputs, torch.bfloat16)
    bias, rule = case.bias if has_bias else None, GateRule(kind, 1.7, 0.8)
    out, wide = case.room(outputs // 2)
    out.fill_(torch.nan)
    thin_gated_product(case.x, case.weight, bias, rule, out, overlaps=False)
    gate, up = case.expected(bias).float().chunk(2, dim=-1)
    case.check(out, wide, gated(rule, gate, up).double())


# The interpreter's, of padding outputs, whose weights are 0.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_affects_no_other(bad: float) -> None:
    case = ProductCase(3, 48, 272, torch.bfloat16)
    case.x[1, 5] = bad
    out, _ = case.room(48)
    thin_product(case.x, case.weight, None, out, adds=False, overlaps=False)
    assert out.isfinite().all(dim=-1).tolist() == [True, False, True]


def test_what_does_not_fit_is_told() -> None:
    weight = torch.zeros(8, 32, dtype=torch.bfloat16)

    def fits(rows: int, dtype: torch.dtype = torch.bfloat16, weight: Tensor = weight) -> bool:
        return fits_thin_product(torch.zeros(rows, weight.shape[1], dtype=dtype), weight.to(dtype))

    assert fits(1)
    assert fits(MOST_ROWS, torch.float16)
    assert not fits(0)
    assert not fits(MOST_ROWS + 1)
    assert not fits(1, torch.float32)
    assert not fits(1, weight=torch.zeros(8, 40, dtype=torch.bfloat16))
    assert not fits_thin_product(torch.zeros(1, 16, dtype=torch.bfloat16), weight[:, :16])


@pytest.mark.parametrize("rows", [0, 1, 2, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_projection_is_the_same_with_any_number_of_rows(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)

    weight, bias, x, stream = random(32, 48) * 0.2, random(32), random(rows, 48), random(rows, 32)
    norm_weight = torch.rand(48, generator=generator).to(DEVICE) + 0.5
    results = []
    for linear in (Linear(weight, bias), ThinLinear(weight, bias, overlaps=False)):
        out, added, gate_up = torch.empty_like(stream), stream.clone(), torch.empty_like(stream)
        half = torch.empty(rows, 16, dtype=dtype, device=DEVICE)
        linear(x, out)
        linear.add(x, added)
        gate, up = gate_up.chunk(2, dim=-1)
        linear.gated(Activation.SILU, x, GateRoom(gate_up, gate, up, half), TORCH)
        normed, normed_half = torch.empty_like(stream), torch.empty_like(half)
        unnormed = Unnormed(3 * x, RmsNorm(norm_weight, 1e-5), torch.empty_like(x))
        linear.of_norm(unnormed, normed, TORCH)
        linear.gated_of_norm(Activation.SILU, unnormed, GateRoom(gate_up, gate, up, normed_half), TORCH)
        results.append((out, added, half, normed, normed_half))
    tolerance = 1e-5 if dtype is torch.float32 else 2.0**-5
    for plain, thin in zip(*results, strict=True):
        torch.testing.assert_close(thin.float(), plain.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(1, 1, 16), (3, 7, 40), (2, 5, 2100), pytest.param(16, 64, 2100, marks=pytest.mark.prove)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_exact_products(rows: int, outputs: int, inputs: int, dtype: torch.dtype, *, has_bias: bool) -> None:
    case = ProductCase(rows, outputs, inputs, dtype)
    weight, bias = torch.randn(outputs, inputs).to(DEVICE) * inputs**-0.5, case.bias if has_bias else None
    wide = torch.ones(rows + 2, outputs + 2, device=DEVICE)
    out = wide[1:-1, 1:-1]
    out.fill_(torch.nan)
    assert fits_exact_product(case.x, weight)
    exact_product(case.x, weight, bias, out, overlaps=False)
    expected = case.x.double() @ weight.double().T
    expected = expected if bias is None else expected + bias.double()
    torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=3e-6)
    out.fill_(1.0)
    assert (wide == 1.0).all(), "wrote beside its rows"
