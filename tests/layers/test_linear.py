"""The order of a product changes its speed and nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sightline.layers.linear import Linear
from sightline.layers.mlp import Activation, GatedMlp
from support.layers import feed, project

ROWS = [0, 1, 5, 6, 16, 48, 49, 128]


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


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("activation", Activation)
def test_any_number_of_rows_goes_through_the_same_feed_forward(rows: int, activation: Activation) -> None:
    gate, up, down = (linear(*shape, bias=True) for shape in ((32, 20), (32, 20), (20, 32)))
    assert gate.bias is not None
    assert up.bias is not None
    x = torch.randn(rows, 20)
    activate = F.silu if activation is Activation.SILU else lambda value: F.gelu(value, approximate="tanh")
    expected = project(down, activate(F.linear(x, gate.weight, gate.bias)) * F.linear(x, up.weight, up.bias))
    fused = Linear(torch.cat((gate.weight, up.weight)), torch.cat((gate.bias, up.bias)))
    torch.testing.assert_close(feed(GatedMlp(fused, down, activation), x), expected, atol=1e-3, rtol=1e-4)
