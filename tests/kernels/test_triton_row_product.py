"""Products of one row: each equals the one in fp64, also of a norm, reads no neighbour and writes nothing beside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from sightline.kernels.triton.gates import GateKind, GateRule
from sightline.kernels.triton.row_product import (
    InputNorm,
    choose_rows,
    fits_row_product,
    row_gated_product,
    row_product,
)
from support.case_marks import proofs
from support.expert_cases import gated
from support.extend_cases import DEVICE
from support.product_cases import ProductCase

# Outputs and inputs: whole blocks, a last block that is not whole, more blocks than are held, and all of it at once.
SHAPES = [(16, 16), (6, 272), (34, 1024), (4, 2816), (8, 8192), (10, 5136)]
shapes = pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
norms = pytest.mark.parametrize("norms", [False, True], ids=["", "norm"])
biases = pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
EPSILON = 0.1


def norm_of(case: ProductCase, inputs: int, *, wanted: bool) -> InputNorm | None:
    """A norm whose weights would also show if it were skipped, and makes the case's inputs long."""
    case.x.mul_(7.0)
    return InputNorm(torch.linspace(0.5, 2.0, inputs).to(DEVICE), EPSILON) if wanted else None


def expected(case: ProductCase, norm: InputNorm | None, bias: Tensor | None) -> Tensor:
    x = case.x.double()
    if norm is not None:
        x = x / (x.square().mean(dim=-1, keepdim=True) + norm.epsilon).sqrt() * norm.weight.double()
    product: Tensor = x @ case.weight.double().T
    return product if bias is None else product + bias.double()


def test_the_shapes_have_more_blocks_than_are_held_and_fewer() -> None:
    blocks = [(config, inputs) for _, inputs in SHAPES for config in [choose_rows(inputs, gates=False)]]
    assert any(config.held * config.inputs < inputs for config, inputs in blocks)
    assert any(config.held * config.inputs > inputs for config, inputs in blocks)


@shapes
@pytest.mark.parametrize("dtype", [torch.bfloat16, *proofs(torch.float16)], ids=str)
@pytest.mark.parametrize("adds", [False, True], ids=["written", "added"])
@norms
@biases
def test_products(outputs: int, inputs: int, dtype: torch.dtype, *, adds: bool, norms: bool, has_bias: bool) -> None:
    case = ProductCase(1, outputs, inputs, dtype)
    norm, bias = norm_of(case, inputs, wanted=norms), case.bias if has_bias else None
    out, wide = case.room(outputs)
    if not adds:
        out.fill_(torch.nan)
    row_product(case.x, case.weight, bias, out, adds=adds, overlaps=False, norm=norm)
    case.check(out, wide, expected(case, norm, bias) + (1.0 if adds else 0.0))


@pytest.mark.prove
@shapes
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, id=kind.name, marks=() if kind is GateKind.SILU else pytest.mark.prove) for kind in GateKind],
)
@norms
@biases
def test_gates(outputs: int, inputs: int, kind: GateKind, *, norms: bool, has_bias: bool) -> None:
    case = ProductCase(1, outputs, inputs, torch.bfloat16)
    norm, bias = norm_of(case, inputs, wanted=norms), case.bias if has_bias else None
    rule = GateRule(kind, 1.7, 0.8)
    out, wide = case.room(outputs // 2)
    out.fill_(torch.nan)
    row_gated_product(case.x, case.weight, bias, rule, out, overlaps=False, norm=norm)
    gate, up = expected(case, norm, bias).float().chunk(2, dim=-1)
    case.check(out, wide, gated(rule, gate, up).double())


@norms
def test_a_row_that_is_not_finite_stays_so(*, norms: bool) -> None:
    case = ProductCase(1, 6, 272, torch.bfloat16)
    norm = norm_of(case, 272, wanted=norms)
    case.x[0, 271] = torch.nan
    out, _ = case.room(6)
    row_product(case.x, case.weight, None, out, adds=False, overlaps=False, norm=norm)
    assert out.isnan().all()


def test_what_does_not_fit_is_told() -> None:
    weight = torch.zeros(8, 32, dtype=torch.bfloat16)

    def fits(rows: int, dtype: torch.dtype = torch.bfloat16, weight: Tensor = weight) -> bool:
        return fits_row_product(torch.zeros(rows, weight.shape[1], dtype=dtype), weight.to(dtype))

    assert fits(1)
    assert fits(1, torch.float16)
    assert not fits(0)
    assert not fits(2)
    assert not fits(1, torch.float32)
    assert not fits(1, weight=torch.zeros(8, 40, dtype=torch.bfloat16))
    assert not fits_row_product(torch.zeros(1, 16, dtype=torch.bfloat16), weight[:, :16])
    x, large = (torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta") for rows in (1, 4096))
    assert fits_row_product(x, large[1:])
    assert not fits_row_product(x, large)


def test_strided_inputs_and_outputs_are_refused() -> None:
    case = ProductCase(1, 32, 32, torch.bfloat16)
    out, _ = case.room(32)
    strided = torch.zeros(32, 2, dtype=torch.bfloat16, device=DEVICE)[:, :1].T
    for x, target in [(strided, out), (case.x, strided)]:
        assert fits_row_product(x, case.weight)
        with pytest.raises(AssertionError, match="expected contiguous rows"):
            row_product(x, case.weight, None, target, adds=False, overlaps=False)
