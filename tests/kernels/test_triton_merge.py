"""Two parts merged are what one softmax over all their keys gives, and parts that saw nothing count for nothing."""

from __future__ import annotations

import pytest
import torch

from sightline.attention.shared.merge import merge_parts
from sightline.kernels.triton.merge import merge_states
from support.extend_cases import DEVICE

INFINITE = -torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (3, 80), (16, 128)])
def test_merged_parts_equal_torch(dtype: torch.dtype, heads: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(1)
    outs = torch.randn(2, 9, heads, dim, generator=generator).to(dtype)
    lses = torch.randn(2, 9, heads, generator=generator) * 20
    out_a, lse_a = outs[0].clone().to(DEVICE), lses[0].clone().to(DEVICE)
    merge_states(out_a, lse_a, outs[1].to(DEVICE), lses[1].to(DEVICE))
    wanted, wanted_lse = merge_parts(outs.float(), lses)
    # The interpreter cuts bf16 off where a device rounds.
    tolerance = 1e-5 if dtype is torch.float32 else 2.0**-7
    torch.testing.assert_close(out_a.cpu().float(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse_a.cpu(), wanted_lse, atol=1e-6, rtol=1e-6)


def test_parts_that_saw_nothing_count_for_nothing() -> None:
    out_a = torch.tensor([1.0, torch.nan, 3.0, torch.nan], device=DEVICE).view(4, 1, 1).repeat(1, 2, 16)
    out_b = torch.tensor([torch.nan, 2.0, 5.0, torch.nan], device=DEVICE).view(4, 1, 1).repeat(1, 2, 16)
    lse_a = torch.tensor([0.5, INFINITE, 1.0, INFINITE], device=DEVICE).view(4, 1).repeat(1, 2)
    lse_b = torch.tensor([INFINITE, -3.0, 1.0, INFINITE], device=DEVICE).view(4, 1).repeat(1, 2)
    merge_states(out_a, lse_a, out_b, lse_b)
    assert out_a[:, 1, 7].tolist() == [1.0, 2.0, 4.0, 0.0]
    torch.testing.assert_close(lse_a[:, 0].cpu(), torch.tensor([0.5, -3.0, 1.6931472, INFINITE]))


def test_a_part_in_half_precision_is_merged_into_fp32() -> None:
    out_a, out_b = torch.zeros(2, 1, 16, device=DEVICE), torch.ones(2, 1, 16, device=DEVICE).bfloat16()
    lse_a, lse_b = torch.zeros(2, 2, 1, device=DEVICE)
    merge_states(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(out_a.cpu(), torch.full((2, 1, 16), 0.5))
