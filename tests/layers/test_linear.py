"""The order of a product changes its speed and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sightline.kernels.block_product import Int4PackProduct
from sightline.kernels.block_weights import BlockWeights, CodeBits
from sightline.layers.activation import Activation
from sightline.layers.linear import BlockLinear, Linear
from sightline.layers.mlp import GatedMlp
from support.layers import feed, project

ROWS = [0, 1, 7, 8, 16, 48, 49, 128]


def linear(out_features: int, in_features: int, *, bias: bool) -> Linear:
    generator = torch.Generator().manual_seed(out_features)
    weight = torch.randn(out_features, in_features, generator=generator)
    return Linear(weight, torch.randn(out_features, generator=generator) if bias else None)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_any_number_of_rows_gives_the_same_product(rows: int, bias: bool) -> None:
    layer = linear(24, 40, bias=bias)
    x = torch.randn(rows, 40)
    expected = F.linear(x, layer.weight, layer.bias)
    for given in (x, x.t().contiguous().t()):
        torch.testing.assert_close(project(layer, given), expected, atol=1e-4, rtol=1e-5)
    row_major = torch.full((rows, 24), torch.nan)
    layer(x, row_major)
    torch.testing.assert_close(row_major, expected, atol=1e-4, rtol=1e-5)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda value: F.gelu(value, approximate="tanh"),
    Activation.RELU: F.relu,
    Activation.SIGMOID: torch.sigmoid,
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("activation", Activation)
def test_any_number_of_rows_goes_through_the_same_feed_forward(rows: int, activation: Activation) -> None:
    gate, up, down = (linear(*shape, bias=True) for shape in ((32, 20), (32, 20), (20, 32)))
    assert gate.bias is not None
    assert up.bias is not None
    x = torch.randn(rows, 20)
    expected = project(
        down, ACTIVATIONS[activation](F.linear(x, gate.weight, gate.bias)) * F.linear(x, up.weight, up.bias)
    )
    fused = Linear(torch.cat((gate.weight, up.weight)), torch.cat((gate.bias, up.bias)))
    torch.testing.assert_close(feed(GatedMlp(fused, down, activation), x), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_a_product_is_added_to_what_is_there(rows: int, bias: bool) -> None:
    layer = linear(24, 40, bias=bias)
    x, before = torch.randn(rows, 40), torch.randn(rows, 24)
    for out in (before.clone(), before.t().clone(memory_format=torch.contiguous_format).t()):
        layer.add(x, out)
        torch.testing.assert_close(out, before + project(layer, x), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("bits", CodeBits)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_block_weights_write_and_add_like_dense_ones(bits: CodeBits, bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = BlockWeights(
        torch.randint(0, 1 << bits, (32, 64), dtype=torch.uint8, generator=generator),
        torch.rand(32, 2, generator=generator),
        torch.randn(32, 2, generator=generator),
        bits,
    )
    shift = torch.randn(32, generator=generator).to(dtype) if bias else None
    layer = BlockLinear(Int4PackProduct(weights), shift)
    x = torch.randn(7, 64, generator=generator).to(dtype)
    expected = F.linear(x.float(), weights.dequantised(), None if shift is None else shift.float())
    scale = float(expected.abs().max())
    got = project(layer, x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float() / scale, expected / scale, atol=0.02, rtol=0)
    out = torch.ones(7, 32, dtype=dtype)
    layer.add(x, out)
    torch.testing.assert_close((out.float() - 1) / scale, expected / scale, atol=0.02, rtol=0)
