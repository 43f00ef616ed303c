"""The oracle of compressed attention: one row, from all of its raw tokens, in fp32, written to be read.

Every backend is compared with this. Nothing here goes on from a state: what a row keeps behind n tokens is a function
of these n tokens. `TokenSums` is the other form, one token after the other, for the reference backends. Does not know
slots or pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.compressed.inputs import CompressionInputs
from sightline.attention.compressed.spec import (
    BEFORE,
    MAXIMUM,
    NEXT,
    OWN,
    SUM,
    WEIGHTED,
    CompressedSpec,
    Compression,
)


def compress_row(compression: Compression, raw: CompressionInputs) -> Tensor:
    """The entries [num_tokens // ratio, head_dim] fp32 of a text, from all of its tokens."""
    head_dim, ratio = raw.norm.shape[0], compression.ratio
    entries = raw.norm.new_zeros(len(raw.values) // ratio, head_dim, dtype=torch.float32)
    for entry in range(len(entries)):
        own = slice(entry * ratio, (entry + 1) * ratio)
        values, gates = raw.values[own, -head_dim:], raw.gates[own, -head_dim:]
        if compression.overlap and entry > 0:
            before = slice(own.start - ratio, own.start)
            values = torch.cat([raw.values[before, :head_dim], values])
            gates = torch.cat([raw.gates[before, :head_dim], gates])
        mixed = (torch.softmax(gates.float(), dim=0) * values.float()).sum(dim=0)
        entries[entry] = finish_entry(compression, mixed, raw, own.stop - 1)
    return entries


def finish_entry(compression: Compression, mixed: Tensor, raw: CompressionInputs, token: int) -> Tensor:
    """[head_dim] fp32: a mixed entry, normalised, and rotated as the token says that completes it."""
    normed = mixed / torch.sqrt(mixed.square().mean() + compression.norm_eps) * raw.norm.float()
    border = len(normed) - compression.rope_dim
    first, second = normed[border::2], normed[border + 1 :: 2]
    cos, sin = raw.cos[token], raw.sin[token]
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=1)
    return torch.cat([normed[:border], turned.flatten()])


def window_behind(spec: CompressedSpec, keys: Tensor) -> Tensor:
    """The window [window, head_dim] that a text leaves, from the keys [num_tokens, head_dim] of all of its tokens."""
    ring = keys.new_zeros(spec.window, keys.shape[1])
    for position in range(max(0, len(keys) - spec.window), len(keys)):
        ring[position % spec.window] = keys[position]
    return ring


def sums_behind(compression: Compression, raw: CompressionInputs) -> Tensor:
    """The sums [num_sums, 3, head_dim] that a text leaves, from all of its tokens."""
    head_dim, ratio = raw.norm.shape[0], compression.ratio
    opened = len(raw.values) // ratio * ratio
    sums = torch.zeros(compression.num_sums, 3, head_dim, device=raw.values.device)
    sums[OWN] = _summed(raw.values[opened:, -head_dim:], raw.gates[opened:, -head_dim:])
    if compression.overlap:
        sums[NEXT] = _summed(raw.values[opened:, :head_dim], raw.gates[opened:, :head_dim])
        before = slice(max(0, opened - ratio), opened)
        sums[BEFORE] = _summed(raw.values[before, :head_dim], raw.gates[before, :head_dim])
    return sums


def _summed(values: Tensor, gates: Tensor) -> Tensor:
    """[3, head_dim]: the triple of some tokens, zeros for none."""
    if not len(values):
        return torch.zeros(3, values.shape[1], device=values.device)
    largest = gates.float().amax(dim=0)
    exponentials = torch.exp(gates.float() - largest)
    return torch.stack([largest, exponentials.sum(dim=0), (exponentials * values.float()).sum(dim=0)])


def attend_compressed_row(
    spec: CompressedSpec,
    q: Tensor,
    positions: Tensor,
    keys: Tensor,
    entries: Tensor,
    sinks: Tensor,
    chosen: Tensor | None,
) -> Tensor:
    """[num_queries, num_q_heads, head_dim] fp32: attention of some tokens of a text.

    q [num_queries, num_q_heads, head_dim] and positions [num_queries] are those of the tokens, keys [num_tokens,
    head_dim] and entries [num_entries, head_dim] those of the whole text. `chosen` [num_queries, top_k] has the numbers
    of the entries that each may read, None if all that it sees.
    """
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for query, position in enumerate(positions.tolist()):
        seen = [keys[max(0, position - spec.window + 1) : position + 1]]
        if chosen is not None:
            seen.append(entries[[entry for entry in chosen[query].tolist() if entry >= 0]])
        elif spec.compression is not None:
            seen.append(entries[: (position + 1) // spec.compression.ratio])
        found = torch.cat([each.float() for each in seen])
        scores = q[query].float() @ found.T * spec.scale
        weights = torch.softmax(torch.cat([scores, sinks.float()[:, None]], dim=1), dim=1)
        out[query] = weights[:, :-1] @ found
    return out


@dataclass
class TokenSums:
    """The sums of a row, which one token after the other is added to."""

    compression: Compression
    sums: Tensor
    """[num_sums, 3, head_dim] fp32; changed in place."""

    def add(self, raw: CompressionInputs, token: int, position: int) -> Tensor | None:
        """Adds a token of the row. Returns the entry [head_dim] fp32 that it completes, if it does."""
        head_dim = raw.norm.shape[0]
        values, gates = raw.values[token].float(), raw.gates[token].float()
        _add(self.sums[OWN], values[-head_dim:], gates[-head_dim:])
        if self.compression.overlap:
            _add(self.sums[NEXT], values[:head_dim], gates[:head_dim])
        if (position + 1) % self.compression.ratio:
            return None
        own = self.sums[OWN].clone()
        if self.compression.overlap:
            _join(own, self.sums[BEFORE])
            self.sums[BEFORE] = self.sums[NEXT]
            self.sums[NEXT] = 0.0
        self.sums[OWN] = 0.0
        return finish_entry(self.compression, own[WEIGHTED] / own[SUM], raw, token)


def _add(triple: Tensor, values: Tensor, gates: Tensor) -> None:
    """Adds a token to a triple [3, head_dim] in place."""
    _join(triple, torch.stack([gates, torch.ones_like(gates), values]))


def _join(triple: Tensor, other: Tensor) -> None:
    """Adds the tokens of another triple to a triple [3, head_dim] in place. A sum of 0 is that of no token."""
    maxima = [torch.where(each[SUM] > 0, each[MAXIMUM], -torch.inf) for each in (triple, other)]
    largest = torch.maximum(*maxima)
    factors = [torch.where(each > -torch.inf, torch.exp(each - largest), 0.0) for each in maxima]
    joined = factors[0] * triple[SUM:] + factors[1] * other[SUM:]
    triple[MAXIMUM], triple[SUM:] = torch.where(largest > -torch.inf, largest, 0.0), joined
