"""The order of a product changes its speed and nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sightline.layers.linear import Linear, fuse, prefers_feature_major
from sightline.layers.mlp import Activation, GatedMlp

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
    out = layer(x)
    torch.testing.assert_close(out, F.linear(x, layer.weight, layer.bias), atol=1e-4, rtol=1e-5)
    assert out.is_contiguous()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("activation", Activation)
def test_any_number_of_rows_goes_through_the_same_feed_forward(rows: int, activation: Activation) -> None:
    gate, up, down = (linear(*shape, bias=True) for shape in ((32, 20), (32, 20), (20, 32)))
    x = torch.randn(rows, 20)
    activate = F.silu if activation is Activation.SILU else lambda value: F.gelu(value, approximate="tanh")
    expected = down(activate(F.linear(x, gate.weight, gate.bias)) * F.linear(x, up.weight, up.bias))
    out = GatedMlp(fuse([gate, up]), down, activation)(x)
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-4)


def test_only_batches_of_decoding_rows_are_turned() -> None:
    assert [rows for rows in ROWS if prefers_feature_major(rows)] == [6, 16, 48]


def test_projections_are_fused_with_all_or_none_of_their_biases() -> None:
    parts = [linear(3, 5, bias=True), linear(4, 5, bias=True)]
    x = torch.randn(2, 5)
    torch.testing.assert_close(fuse(parts)(x), torch.cat([part(x) for part in parts], dim=1))
    with pytest.raises(ValueError, match="expected all or none of 2 projections to have a bias, got 1"):
        fuse([parts[0], linear(4, 5, bias=False)])
