"""Normalisation is computed in fp32 whatever comes in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from sightline.layers.norm import RmsNorm
from support.layers import TORCH


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    out = torch.full_like(x, torch.nan)
    TORCH.norm(x, RmsNorm(weight, epsilon), out)
    return out


def test_it_is_the_norm_of_transformers() -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(5, 3, 32, generator=generator), torch.randn(32, generator=generator)
    theirs = LlamaRMSNorm(32, eps=1e-5)
    theirs.weight.data = weight
    torch.testing.assert_close(normed(x, weight, 1e-5), theirs(x).detach())


@pytest.mark.parametrize("epsilon", [1e-6, 1.0])
def test_it_divides_by_the_root_of_the_mean_square(epsilon: float) -> None:
    x = torch.tensor([[3.0, -4.0, 0.0, 0.0]])
    expected = x / (25.0 / 4.0 + epsilon) ** 0.5 * torch.tensor([1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(normed(x, torch.tensor([1.0, 2.0, 3.0, 4.0]), epsilon), expected)


def test_half_precision_does_not_overflow_on_the_way() -> None:
    x = torch.full((1, 8), 60000.0, dtype=torch.float16)
    torch.testing.assert_close(normed(x, torch.ones(8), 1e-6), torch.ones(1, 8, dtype=torch.float16))


def test_a_row_of_zeros_stays_zero() -> None:
    assert normed(torch.zeros(2, 8), torch.ones(8), 1e-6).count_nonzero() == 0


def test_the_input_is_left_as_it_was() -> None:
    x = torch.ones(2, 8)
    normed(x, torch.full((8,), 2.0), 1e-6)
    assert torch.equal(x, torch.ones(2, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_may_write_over_its_input(dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(5)).to(dtype), torch.rand(8)
    expected = normed(x, weight, 1e-6)
    TORCH.norm(x, RmsNorm(weight, 1e-6), x)
    assert torch.equal(x, expected)


def test_it_reads_any_memory_order() -> None:
    x, weight = torch.randn(16, 8, generator=torch.Generator().manual_seed(6)), torch.rand(8)
    feature_major = x.t().contiguous().t()
    torch.testing.assert_close(normed(feature_major, weight, 1e-6), normed(x, weight, 1e-6))
