"""Attention of the CPU kernels beside the oracle: contexts of several blocks and splits, over poisoned pages."""

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
    """What the kernels gave, and what the oracle gives: outputs [tokens, heads, dim] and LSE [tokens, heads]."""

    out: Tensor
    lse: Tensor
    expected: Tensor
    expected_lse: Tensor

    def error(self) -> float:
        differences = (self.out.float() - self.expected).abs().max(), (self.lse - self.expected_lse).abs().max()
        return max(float(each) for each in differences)


class _Row(NamedTuple):
    """A row's data, which depend on its number and its length only."""

    q: Tensor
    """[new tokens, heads, dim]"""
    keys: Tensor
    """[context, key heads, dim], with scores that grow along the context."""
    values: Tensor

    @staticmethod
    def random(number: int, heads: Heads, context: int, new_tokens: int) -> _Row:
        generator = torch.Generator().manual_seed(3 + number)
        kv_heads, group, dim = heads
        keys, values = (torch.randn(context, kv_heads, dim, generator=generator) for _ in range(2))
        q = torch.randn(context, kv_heads * group, dim, generator=generator)[context - new_tokens :]
        return _Row(q, keys * torch.linspace(0.2, 2.0, context)[:, None, None], values)


def attended(
    heads: Heads,
    cache: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    contexts: Sequence[int] = LONG,
    *,
    new_tokens: Sequence[int] | None = None,
    num_threads: int = 7,
    launcher: Launcher | None = None,
    window: int | None = None,
    nan_at: tuple[int, int] | None = None,
) -> Attended:
    """The last `new_tokens` of each row, by the kernel of prompts; if there are none, the last one by that of decode.

    `nan_at` is a key and a dimension of row 0's values. Runs on the launcher, otherwise for `num_threads` threads in
    turn.
    """
    kv_heads, group, dim = heads
    counts = [1] * len(contexts) if new_tokens is None else new_tokens
    rows = [_Row.random(i, heads, *lens) for i, lens in enumerate(zip(contexts, counts, strict=True))]
    shape = AttentionShape(kv_heads, group, dim, dim, has_prompts=new_tokens is not None)
    launcher = launcher or SerialLauncher(num_threads)
    calls = AttentionCalls(launcher, shape, dtype, cache, dtype, dtype)
    scratch = AttentionScratch.of(_poisoned, shape, sum(counts), launcher.num_threads)
    lengths = [-(-context // PAGE) for context in contexts]
    table = torch.zeros(len(contexts), max(lengths), dtype=torch.int64)
    order = torch.split(torch.randperm(sum(lengths), generator=torch.Generator().manual_seed(1)), lengths)
    slots = []
    for row, pages in enumerate(order):
        table[row, : len(pages)] = pages
        slots.append((pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[: contexts[row]])
    ends = [range(context - count + 1, context + 1) for context, count in zip(contexts, counts, strict=True)]
    seen = [(row, max(0, end - (window or end)), end) for row, own in enumerate(ends) for end in own]
    # What no token of a row sees is poison too.
    hidden = [max(0, own[0] - (window or own[0])) for own in ends]
    planes = [torch.full((sum(lengths) * PAGE, kv_heads, dim), torch.nan) for _ in range(2)]
    for data, own, count in zip(rows, slots, hidden, strict=True):
        planes[0][own[count:]], planes[1][own[count:]] = data.keys[count:], data.values[count:]
    if nan_at is not None:
        planes[1][slots[0][nan_at[0]], :, nan_at[1]] = torch.nan
    keys, values = (plane.to(cache) for plane in planes)
    q = torch.cat([row.q for row in rows]).to(dtype)
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan)
    scratch.located.zero_()
    scratch.located[:, :3] = torch.tensor(seen)
    spec = SoftmaxSpec(kv_heads * group, kv_heads, dim, dim**-0.5, window)
    scales = (0.5, 0.25) if cache.itemsize == 1 else (1.0, 1.0)
    own_keys, own_values = Entries(keys, scales[0]), Entries(values, scales[1])
    lens = None if new_tokens is None else torch.tensor(new_tokens)
    calls.attend(q, own_keys, own_values, Pages(table, PAGE), scratch, out, scale=spec.scale, lse=lse, query_lens=lens)
    answers, first = [], 0
    for own, count, start in zip(slots, counts, hidden, strict=True):
        bounds, places = torch.tensor(seen[first : first + count]), torch.arange(start, len(own))
        visible = (places >= bounds[:, 1:2]) & (places < bounds[:, 2:])
        k, v = (plane.float()[own[start:]] * scale for plane, scale in zip((keys, values), scales, strict=True))
        answers.append(attend_row(spec, q[first : first + count], k, v, visible, None))
        first += count
    return Attended(out, lse, torch.cat([each[0] for each in answers]), torch.cat([each[1] for each in answers]))


def _poisoned(name: str, size: tuple[int, ...], kind: torch.dtype) -> Tensor:
    del name
    return torch.full(size, torch.nan if kind.is_floating_point else 255, dtype=kind)
