"""Plans for latent attention, as data: which keys of which rows are computed how, decided before the first layer.

    absorbed      |------------- keys -------------|   queries projected into latent space; entries read in place
    one-shot      |------------- keys -------------|   every head's keys and values expanded from entries, at once
    prefix chunk  |-- chunk --|-- chunk --|            like one-shot, for a part of the context, seen by all queries
    ragged                                |- new --|   like one-shot, for the step's own tokens

A row is computed in one of three ways: absorbed, one-shot, or chunked, which merges prefix chunks and a ragged phase.
The cost of each, in multiplications per head, for q new tokens among s keys:

    absorbed   q * latent * (nope + value)  +  q * s * (2 * latent + rope)
    others     s * latent * (nope + value)  +  q * s * (nope + rope + value)

so few queries are absorbed and many are not. One-shot costs the same as chunks, without the merges, but needs memory
for every key; chunks need memory for one chunk.

Pure functions of lengths and room. Does not know tensors or backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from sightline.attention.shared.tiles import RowSpan
from sightline.attention.spec import LatentSpec
from sightline.core.batch import MaskKind


class Way(Enum):
    """How a whole row is computed."""

    ABSORBED = "absorbed"
    ONE_SHOT = "one-shot"
    CHUNKED = "chunked"


class PhaseKind(Enum):
    """How the keys of a phase are used."""

    ABSORBED = "absorbed"
    ONE_SHOT = "one-shot"
    PREFIX_CHUNK = "prefix chunk"
    RAGGED = "ragged"


@dataclass(frozen=True)
class RowPart:
    """Some queries of a row and a range of its keys.

    |-- context_len --|-- new tokens --|
          |-- keys: first_key .. stop_key --|
    """

    span: RowSpan
    """The row."""
    first_query: int
    """The first new token that takes part; all later ones do too."""
    first_key: int
    stop_key: int

    @property
    def num_queries(self) -> int:
        return self.span.query_len - self.first_query

    @property
    def num_keys(self) -> int:
        return self.stop_key - self.first_key


@dataclass(frozen=True)
class Phase:
    """Parts of rows that are computed together."""

    kind: PhaseKind
    parts: tuple[RowPart, ...]

    @property
    def num_keys(self) -> int:
        return sum(part.num_keys for part in self.parts)


Choose: TypeAlias = Callable[[LatentSpec, RowSpan, int], Way]
"""Chooses how to compute a row, given the number of keys that fit in memory at once."""


def absorbed_cost(spec: LatentSpec, query_len: int, num_keys: int) -> int:
    """Multiplications per head."""
    once = spec.latent_dim * (spec.nope_dim + spec.value_dim)
    return query_len * (once + num_keys * (2 * spec.latent_dim + spec.rope_dim))


def expanded_cost(spec: LatentSpec, query_len: int, num_keys: int) -> int:
    """Multiplications per head if keys and values are expanded."""
    once = spec.latent_dim * (spec.nope_dim + spec.value_dim)
    return num_keys * (once + query_len * (spec.nope_dim + spec.rope_dim + spec.value_dim))


def cheapest_way(spec: LatentSpec, span: RowSpan, room: int) -> Way:
    """The way with the fewest multiplications that fits in memory."""
    num_keys = span.context_len + span.query_len
    # A tree mask covers queries and keys together, so it is not split.
    if span.kind is MaskKind.TREE or absorbed_cost(spec, span.query_len, num_keys) <= expanded_cost(
        spec, span.query_len, num_keys
    ):
        return Way.ABSORBED
    return Way.ONE_SHOT if num_keys <= room else Way.CHUNKED


def plan_phases(spans: Sequence[RowSpan], spec: LatentSpec, room: int, choose: Choose) -> tuple[Phase, ...]:
    """The phases of a step. Only the absorbed phase may have more than `room` keys."""
    ways = {span: choose(spec, span, room) for span in spans}
    whole = [RowPart(span, 0, 0, span.context_len + span.query_len) for span in spans]
    absorbed = tuple(part for part in whole if ways[part.span] is Way.ABSORBED)
    one_shot = [part for part in whole if ways[part.span] is Way.ONE_SHOT]
    chunked = [span for span in spans if ways[span] is Way.CHUNKED]
    prefixes = [RowPart(span, 0, 0, span.context_len) for span in chunked if span.context_len]
    return (
        *([Phase(PhaseKind.ABSORBED, absorbed)] if absorbed else []),
        *_packed(PhaseKind.ONE_SHOT, one_shot, room),
        *_packed(PhaseKind.PREFIX_CHUNK, _cut(prefixes, room), room),
        *_packed(PhaseKind.RAGGED, [part for span in chunked for part in _ragged(span, room)], room),
    )


def split_absorbed(phases: Sequence[Phase]) -> tuple[list[RowSpan], list[Phase]]:
    """The rows of the absorbed phase, and the other phases."""
    absorbed = [part.span for phase in phases if phase.kind is PhaseKind.ABSORBED for part in phase.parts]
    return absorbed, [phase for phase in phases if phase.kind is not PhaseKind.ABSORBED]


def _ragged(span: RowSpan, room: int) -> Iterator[RowPart]:
    """A row's own tokens as keys. If they do not all fit, earlier causal queries skip the later runs."""
    for start in range(0, span.query_len, room):
        stop = min(start + room, span.query_len)
        first_query = start if span.kind is MaskKind.CAUSAL else 0
        yield RowPart(span, first_query, span.context_len + start, span.context_len + stop)


def _cut(parts: Iterable[RowPart], room: int) -> Iterator[RowPart]:
    """Splits runs of keys at phase boundaries."""
    left = room
    for part in parts:
        start = part.first_key
        while start < part.stop_key:
            stop = min(start + left, part.stop_key)
            yield RowPart(part.span, part.first_query, start, stop)
            left = (left - (stop - start)) or room
            start = stop


def _packed(kind: PhaseKind, parts: Iterable[RowPart], room: int) -> Iterator[Phase]:
    """Packs parts into phases of at most `room` keys."""
    packed: list[RowPart] = []
    num_keys = 0
    for part in parts:
        if packed and num_keys + part.num_keys > room:
            yield Phase(kind, tuple(packed))
            packed, num_keys = [], 0
        packed.append(part)
        num_keys += part.num_keys
    if packed:
        yield Phase(kind, tuple(packed))
