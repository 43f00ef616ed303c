"""The parts of a correct backend of latent attention, one by one: a fault is one of them replaced.

A row goes one of three ways, by its lengths: few queries meet entries as they are cached, many meet keys that are made
of them, and where those would be too many, the context goes chunk by chunk:

    absorbed    |------------ entries ------------|
    one-shot    |------------- keys --------------|
    chunked     |- chunk -|- chunk -|- ch |- new --|     all rows' first chunks, all rows' second ones, then the new

In a round of chunks a row whose context has ended has an empty one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sightline.attention.contract import LatentInputs
from sightline.attention.oracle.attention import loaded_entries
from sightline.attention.shared.merge import merge_parts
from sightline.attention.spec import LatentSpec
from sightline.core.batch import MaskKind

CHUNK = 64
"""Entries of a context that are made into keys and values at once."""
ROOM = 256
"""Keys of a row up to which it is not cut."""
FEW = 4
"""New tokens up to which entries are read as they are."""
Kept: TypeAlias = dict[Any, Any]
"""What a backend keeps from step to step. The correct one keeps nothing."""


class Way(Enum):
    """How a row is computed."""

    ABSORBED = "absorbed"
    ONE_SHOT = "one-shot"
    CHUNKED = "chunked"


@dataclass(frozen=True, eq=False)
class LatentRow:
    """One row of a step."""

    first_token: int
    query_len: int
    context_len: int
    table_row: int
    kind: MaskKind
    visible: Tensor
    """[query_len, seq_len] bool."""

    @property
    def seq_len(self) -> int:
        return self.context_len + self.query_len

    @property
    def tokens(self) -> slice:
        return slice(self.first_token, self.first_token + self.query_len)


Piece: TypeAlias = tuple[Tensor, Tensor]
"""The output [query_len, heads, value] over some of a row's keys, and their LSE [query_len, heads]."""
Chunks: TypeAlias = tuple[tuple[int, int], ...]
"""Of one row: from which entry to which, one chunk for each round."""


def by_lengths(row: LatentRow) -> Way:
    if row.query_len <= FEW or row.kind is MaskKind.TREE:
        return Way.ABSORBED
    return Way.ONE_SHOT if row.seq_len <= ROOM else Way.CHUNKED


def as_given(inputs: LatentInputs) -> Tensor:
    return torch.cat([inputs.latent, inputs.k_rope], dim=-1)


def in_rounds(rows: Sequence[LatentRow], kept: Kept) -> tuple[Chunks, ...]:
    """As many rounds as the longest context needs."""
    del kept
    longest = max((row.context_len for row in rows), default=0)
    starts = range(0, longest, CHUNK)
    return tuple(
        tuple((min(start, row.context_len), min(start + CHUNK, row.context_len)) for start in starts) for row in rows
    )


def as_visible(row: LatentRow, visible: Tensor) -> Tensor:
    del row
    return visible


def merge(pieces: Sequence[Piece]) -> Piece:
    outs, lses = zip(*pieces, strict=True)
    return merge_parts(torch.stack(outs), torch.stack(lses))


def taken_places(row: LatentRow, query: int, choice: Tensor) -> Tensor:
    del row, query
    return choice[choice >= 0].long()


@dataclass(frozen=True)
class LatentParts:
    """What a backend is made of. The defaults are correct."""

    way: Callable[[LatentRow], Way] = by_lengths
    entry: Callable[[LatentInputs], Tensor] = as_given
    """What is cached of the new tokens, [num_tokens, latent + rope]."""
    load: Callable[[Tensor, float], Tensor] = loaded_entries
    """Entries of what stands in the cache and the layer's scale of it."""
    scale: Callable[[LatentSpec], float] = lambda spec: spec.scale
    rotated: Callable[[Tensor], Tensor] = lambda q_rope: q_rope
    """The part of queries that meets the rotated part of keys."""
    value_head: Callable[[int, int], int] = lambda head, heads: head
    """By whose projection a head's values are made."""
    absorbed_stop: Callable[[LatentRow, int], int] = lambda row, page_size: row.seq_len
    """How many entries a row is taken to have where they are read as they are."""
    one_shot_sees: Callable[[LatentRow, Tensor], Tensor] = as_visible
    new_sees: Callable[[LatentRow, Tensor], Tensor] = as_visible
    """Of a row in chunks: what its new tokens see of each other."""
    chunks: Callable[[Sequence[LatentRow], Kept], tuple[Chunks, ...]] = in_rounds
    chunk_row: Callable[[int, int], int] = lambda row, num_rows: row
    """In whose pages a row's chunks lie."""
    merge: Callable[[Sequence[Piece]], Piece] = merge
    merged_lse: Callable[[Tensor, Tensor], Tensor] = lambda merged, new: merged
    """From that of all parts and that of the new tokens alone."""
    chosen: Callable[[LatentRow, Tensor, Kept], Tensor] = lambda row, chosen, kept: chosen
    """The choice [query_len, top_k] of a row's queries; the plan keeps something from layer to layer."""
    places: Callable[[LatentRow, int, Tensor], Tensor] = taken_places
    """The places of the entries that a query reads, from its choice [top_k]."""
    weighed: Callable[[Tensor, Tensor], Tensor] = lambda places, choice: torch.ones_like(places, dtype=torch.bool)
    """Which of the read entries count."""
    page_size: Callable[[int], int] = lambda page_size: page_size
    """With which chosen entries are looked up."""
    chosen_lse: Callable[[Tensor, Callable[[], Tensor]], Tensor] = lambda chosen, of_all: chosen
    """From that of the chosen entries and that of all."""
    reads_padding: bool = False
    """Whether what padding tokens chose is looked up."""


CORRECT = LatentParts()
