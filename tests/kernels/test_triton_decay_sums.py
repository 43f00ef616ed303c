"""Decays are summed within the chunks of segments, and strong ones are bounded."""

from __future__ import annotations

import itertools

import torch

from sightline.kernels.triton.decay_sums import decay_sums
from support.extend_cases import DEVICE

BORDERS = [0, 70, 71, 199]
CHUNK, HEADS, SIZE = 64, 3, 24


def test_sums_begin_with_chunks_and_are_bounded() -> None:
    decay = -torch.rand(BORDERS[-1], HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    decay[3], decay[80, 1], decay[100, 2, 5] = -torch.inf, -1e9, torch.nan
    chunks = torch.tensor([[0, 0], [0, 1], [1, 0], [2, 0], [2, 1]], device=DEVICE)
    # A part of a wider tensor.
    given = torch.cat([torch.full_like(decay, torch.nan), decay], dim=2).to(DEVICE)[:, :, SIZE:]
    out = torch.full((BORDERS[-1] + 1, HEADS, SIZE), 7.0, device=DEVICE)
    decay_sums(given, torch.tensor(BORDERS, device=DEVICE), chunks, out[:-1], chunk=CHUNK, scale=2.0, least=-128.0)
    bounded = torch.where(decay < -128.0, -128.0, decay)
    starts = [0, 64, 70, 71, 135, 199]
    wanted = torch.cat([2.0 * bounded[start:stop].cumsum(0) for start, stop in itertools.pairwise(starts)])
    torch.testing.assert_close(out[:-1].cpu(), wanted, atol=1e-3, rtol=1e-5, equal_nan=True)
    assert (out[-1] == 7.0).all()


def test_all_tokens_may_share_their_decays() -> None:
    decay = -torch.rand(1, HEADS, SIZE, generator=torch.Generator().manual_seed(1)).to(DEVICE).expand(9, -1, -1)
    out = torch.empty(9, HEADS, SIZE, device=DEVICE)
    borders, chunks = torch.tensor([0, 9], device=DEVICE), torch.tensor([[0, 0]], device=DEVICE)
    decay_sums(decay, borders, chunks, out, chunk=CHUNK, scale=1.0, least=-128.0)
    torch.testing.assert_close(out, decay.cumsum(0))
