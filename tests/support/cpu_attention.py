"""Decode attention of the CPU kernels beside the oracle: contexts of several blocks and splits, over poisoned pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sightline.attention.backends.numba.calls import AttentionCalls, AttentionScratch, AttentionShape, Entries, Pages
from sightline.attention.oracle.attention import attend_row
from sightline.attention.spec import SoftmaxSpec
from sightline.kernels.cpu.record import Launcher
from support.cpu_launchers import SerialLauncher

PAGE = 16
LONG = (1, 63, 64, 65, 130, 700)
"""Contexts of the rows of a step: around a block and a split, and of several."""


class Heads(NamedTuple):
    kv_heads: int
    group: int
    dim: int


class Attended(NamedTuple):
    """What the kernels gave, and what the oracle gives: outputs [rows, heads, dim] and LSE [rows, heads]."""

    out: Tensor
    lse: Tensor
    expected: Tensor
    expected_lse: Tensor

    def error(self) -> float:
        differences = (self.out.float() - self.expected).abs().max(), (self.lse - self.expected_lse).abs().max()
        return max(float(each) for each in differences)


def attended(
    heads: Heads,
    cache: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    contexts: Sequence[int] = LONG,
    *,
    num_threads: int = 7,
    launcher: Launcher | None = None,
    window: int | None = None,
    nan_at: tuple[int, int] | None = None,
) -> Attended:
    """One new token a row, whose scores grow along the context. `nan_at` is a key and a dimension of row 0's values.

    Runs on the launcher, otherwise for `num_threads` threads in turn.
    """
    generator = torch.Generator().manual_seed(3)
    kv_heads, group, dim = heads
    shape, launcher = AttentionShape(kv_heads, group, dim, dim), launcher or SerialLauncher(num_threads)
    calls = AttentionCalls(launcher, shape, dtype, cache, dtype, dtype)
    scratch = AttentionScratch.of(_poisoned, shape, len(contexts), launcher.num_threads)
    lengths = [-(-context // PAGE) for context in contexts]
    table = torch.zeros(len(contexts), max(lengths), dtype=torch.int64)
    order = torch.split(torch.randperm(sum(lengths), generator=generator), lengths)
    slots = []
    for row, pages in enumerate(order):
        table[row, : len(pages)] = pages
        slots.append((pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[: contexts[row]])
    planes = [torch.full((sum(lengths) * PAGE, kv_heads, dim), torch.nan) for _ in range(2)]
    for own in slots:
        growth = torch.linspace(0.2, 2.0, len(own))[:, None, None]
        planes[0][own] = torch.randn(len(own), kv_heads, dim, generator=generator) * growth
        planes[1][own] = torch.randn(len(own), kv_heads, dim, generator=generator)
    if nan_at is not None:
        planes[1][slots[0][nan_at[0]], :, nan_at[1]] = torch.nan
    keys, values = (plane.to(cache) for plane in planes)
    q = torch.randn(len(contexts), kv_heads * group, dim, generator=generator).to(dtype)
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan)
    scratch.located.zero_()
    for row, context in enumerate(contexts):
        scratch.located[row, :3] = torch.tensor([row, max(0, context - (window or context)), context])
    spec = SoftmaxSpec(kv_heads * group, kv_heads, dim, dim**-0.5, window)
    scales = (0.5, 0.25) if cache.itemsize == 1 else (1.0, 1.0)
    own_keys, own_values = Entries(keys, scales[0]), Entries(values, scales[1])
    calls.attend(q, own_keys, own_values, Pages(table, PAGE), scratch, out, scale=spec.scale, lse=lse)
    answers = []
    for row, own in enumerate(slots):
        visible = torch.arange(len(own))[None] >= int(scratch.located[row, 1])
        k, v = (plane.float()[own] * scale for plane, scale in zip((keys, values), scales, strict=True))
        answers.append(attend_row(spec, q[row : row + 1], k, v, visible, None))
    return Attended(out, lse, torch.cat([each[0] for each in answers]), torch.cat([each[1] for each in answers]))


def _poisoned(name: str, size: tuple[int, ...], kind: torch.dtype) -> Tensor:
    del name
    return torch.full(size, torch.nan if kind.is_floating_point else 255, dtype=kind)
