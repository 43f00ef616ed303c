"""Writing entries: every byte where it belongs and nowhere else, e4m3 with torch's own bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sightline.kernels.triton.write import write_keys_values, write_latents
from support.extend_cases import DEVICE

FP8 = torch.float8_e4m3fn
UNTOUCHED = 5.0


def torch_e4m3(values: Tensor, scale: Tensor) -> Tensor:
    return (values.float() / scale).clamp(-448, 448).to(FP8)


def projection(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values as parts of one projection: neither's tokens lie side by side."""
    generator = torch.Generator().manual_seed(1)
    both = torch.randn(num_tokens, 2 * num_heads + 1, head_dim, generator=generator).to(dtype).to(DEVICE)
    return both[:, 1 : 1 + num_heads], both[:, 1 + num_heads :]


def same_bits(actual: Tensor, wanted: Tensor) -> bool:
    return bool((actual.contiguous().view(torch.uint8) == wanted.contiguous().view(torch.uint8)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 64), (3, 80), (8, 128)])
def test_keys_and_values_go_to_their_slots_only(dtype: torch.dtype, num_heads: int, head_dim: int) -> None:
    k, v = projection(7, num_heads, head_dim, dtype)
    slots = torch.tensor([30, 2, 9, 4, 31, 1, 12], device=DEVICE)
    keys, values = torch.full((2, 32, num_heads, head_dim), UNTOUCHED, dtype=dtype, device=DEVICE)
    write_keys_values(k, v, keys, values, slots)
    for plane, new in ((keys, k), (values, v)):
        assert same_bits(plane[slots], new)
        others = torch.ones(32, dtype=torch.bool, device=DEVICE)
        others[slots] = False
        assert bool((plane[others] == UNTOUCHED).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_has_the_bits_that_torch_gives(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    halfway = (codes[:126] + codes[1:127]) / 2
    beyond = torch.tensor([449.0, 464.0, 1e30, torch.inf, 0.0, -0.0, 1e-12, torch.nan])
    spread = torch.randn(3000, generator=torch.Generator().manual_seed(2)) * torch.logspace(-6, 4, 3000)
    numbers = torch.cat([codes, halfway, -halfway, beyond, -beyond[:-1], spread])
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.numel() % 128)).view(-1, 1, 128).to(dtype).to(DEVICE)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(3))[: numbers.shape[0]].to(DEVICE)
    keys, values = torch.zeros(2, 40, 1, 128, device=DEVICE).to(FP8)
    k_scale, v_scale = torch.tensor([1.0, 0.37], device=DEVICE)
    write_keys_values(numbers, numbers, keys, values, slots, k_scale, v_scale.view(1))
    # A NaN's sign says nothing.
    for plane, scale in ((keys, k_scale), (values, v_scale)):
        actual, wanted = plane[slots].cpu(), torch_e4m3(numbers, scale).cpu()
        is_nan = wanted.float().isnan()
        assert bool((actual.float().isnan() == is_nan).all())
        assert same_bits(actual.view(torch.uint8)[~is_nan], wanted.view(torch.uint8)[~is_nan])


def test_padding_tokens_share_a_slot() -> None:
    k, v = projection(6, 2, 16, torch.float32)
    slots = torch.tensor([3, 4, 0, 0, 0, 0], device=DEVICE)
    keys, values = torch.full((2, 8, 2, 16), UNTOUCHED, device=DEVICE)
    write_keys_values(k, v, keys, values, slots)
    assert same_bits(keys[[3, 4]], k[:2])
    assert any(same_bits(values[0], each) for each in v[2:])
    assert bool((keys[5:] == UNTOUCHED).all())


@pytest.mark.parametrize(("latent_dim", "rope_dim"), [(512, 64), (48, 24)])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
def test_latents_and_ropes_lie_side_by_side(latent_dim: int, rope_dim: int, cache_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    both = torch.randn(9, latent_dim + rope_dim + 3, generator=generator).bfloat16().to(DEVICE)
    latent, k_rope = both[:, :latent_dim], both[:, latent_dim + 3 :]
    slots = torch.tensor([9, 1, 8, 2, 7, 3, 6, 4, 5], device=DEVICE)
    entries = torch.zeros(12, latent_dim + rope_dim, device=DEVICE).to(cache_dtype)
    scale = torch.tensor(0.11, device=DEVICE) if cache_dtype is FP8 else None
    write_latents(latent, k_rope, entries, slots, scale)
    wanted = torch.cat([latent, k_rope], dim=1)
    assert same_bits(entries.view(torch.uint8)[slots], wanted if scale is None else torch_e4m3(wanted, scale))
    assert bool((entries.view(torch.uint8)[[0, 10, 11]] == 0).all())


def test_no_tokens_write_nothing() -> None:
    k, v = projection(0, 2, 16, torch.float32)
    keys, values = torch.full((2, 8, 2, 16), UNTOUCHED, device=DEVICE)
    write_keys_values(k, v, keys, values, torch.zeros(0, dtype=torch.int64, device=DEVICE))
    assert bool((keys == UNTOUCHED).all())


def test_scales_are_for_fp8_planes() -> None:
    k, v = projection(1, 1, 16, torch.float32)
    keys, values = torch.zeros(2, 4, 1, 16, device=DEVICE)
    one, slots = torch.ones((), device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="exactly for a float8_e4m3fn plane"):
        write_keys_values(k, v, keys, values, slots, one, one)
    with pytest.raises(ValueError, match="exactly for a float8_e4m3fn plane"):
        write_keys_values(k, v, keys.to(FP8), values.to(FP8), slots, one)
