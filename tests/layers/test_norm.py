"""Normalisation is computed in fp32 whatever comes in."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from sightline.layers.norm import RmsNorm


def test_it_is_the_norm_of_transformers() -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(5, 3, 32, generator=generator), torch.randn(32, generator=generator)
    theirs = LlamaRMSNorm(32, eps=1e-5)
    theirs.weight.data = weight
    torch.testing.assert_close(RmsNorm(weight, 1e-5)(x), theirs(x).detach())


@pytest.mark.parametrize("epsilon", [1e-6, 1.0])
def test_it_divides_by_the_root_of_the_mean_square(epsilon: float) -> None:
    x = torch.tensor([[3.0, -4.0, 0.0, 0.0]])
    expected = x / (25.0 / 4.0 + epsilon) ** 0.5 * torch.tensor([1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(RmsNorm(torch.tensor([1.0, 2.0, 3.0, 4.0]), epsilon)(x), expected)


def test_half_precision_does_not_overflow_on_the_way() -> None:
    x = torch.full((1, 8), 60000.0, dtype=torch.float16)
    normed = RmsNorm(torch.ones(8), 1e-6)(x)
    assert normed.dtype == torch.float16
    torch.testing.assert_close(normed, torch.ones(1, 8, dtype=torch.float16))


def test_a_row_of_zeros_stays_zero() -> None:
    assert RmsNorm(torch.ones(8), 1e-6)(torch.zeros(2, 8)).count_nonzero() == 0


def test_the_input_is_left_as_it_was() -> None:
    x = torch.ones(2, 8)
    RmsNorm(torch.full((8,), 2.0), 1e-6)(x)
    assert torch.equal(x, torch.ones(2, 8))
