"""Every head's own product, in Triton's interpreter or on the card."""

from __future__ import annotations

import pytest
import torch

from sightline.kernels.triton.chip import Chip
from sightline.kernels.triton.project import project_real
from support.case_marks import proofs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


OVERLAPS = Chip.of(DEVICE).overlaps


@pytest.mark.parametrize("early", [False, *proofs(True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "num_real", "heads", "latent", "value"),
    [(5, 3, 3, 40, 24), (1, 0, 4, 32, 16), (20, 20, 2, 96, 128), (70, 65, 2, 64, 34), (16, 15, 2, 600, 48)],
)
def test_real_tokens_are_projected_and_padding_stays(
    num_tokens: int, num_real: int, heads: int, latent: int, value: int, dtype: torch.dtype, early: bool
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    found = torch.randn(num_tokens, heads, latent, generator=generator).to(dtype)
    found[num_real:] = torch.nan
    found[num_real:, :, ::2] = torch.finfo(dtype).max
    value_up = (torch.randn(heads, value, latent, generator=generator) * latent**-0.5).to(dtype)
    out = torch.full((num_tokens, heads, value), torch.nan, dtype=dtype, device=DEVICE)
    real = torch.tensor([num_real], device=DEVICE)
    project_real(found.to(DEVICE), value_up.to(DEVICE), real, out, overlaps=OVERLAPS, early=early)
    expected = torch.einsum("thl,hvl->thv", found[:num_real].float(), value_up.float())
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out[:num_real].cpu().float(), expected, atol=tolerance, rtol=tolerance)
    assert out[num_real:].isnan().all()


def test_what_is_multiplied_may_lie_in_memory_anyhow() -> None:
    found = torch.randn(4, 2, 48, device=DEVICE)[..., :32]
    out = torch.zeros(4, 2, 40, device=DEVICE)[..., :16]
    value_up = torch.randn(2, 32, 16, device=DEVICE).transpose(1, 2)
    project_real(found, value_up, torch.tensor([4], device=DEVICE), out)
    torch.testing.assert_close(out, torch.einsum("thl,hvl->thv", found, value_up), atol=1e-5, rtol=1e-5)


def test_something_is_copied_behind_the_product() -> None:
    given, beside = torch.randn(5, 3, 40, device=DEVICE), torch.randn(5, 4, 24, device=DEVICE)[:, 1:]
    up = torch.randn(3, 40, 96, device=DEVICE)
    out = torch.full((5, 3, 96 + 24), torch.nan, device=DEVICE)
    project_real(given, up.transpose(1, 2), torch.tensor([4], device=DEVICE), out, beside=beside)
    expected = torch.cat([torch.einsum("thk,hkn->thn", given, up), beside], dim=-1)
    torch.testing.assert_close(out[:4], expected[:4], atol=1e-4, rtol=1e-4)
    assert out[4:].isnan().all()
