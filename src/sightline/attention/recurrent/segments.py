"""How the rows of a step are computed by recurrent layers: which rows together, cut where, in which order.

    short rows   one token after the other, rows of equal length side by side
    long rows    |-- segment --|-- segment --|- segment -|     cut where a state is kept, and after `chunk` tokens
                 |-- segment --|-- segment --|
                    wave 0         wave 1        wave 2        one segment of every row that has as many

Rows with more segments come first, so that a wave is a prefix of the rows. Plain numbers: does not know tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SHORT_ROW = 8
"""The longest row that is computed token by token: from here on, the products of a chunk cost less."""


class RowTokens(NamedTuple):
    """The new tokens of one row."""

    row: int
    first: int
    """Its first token in the step."""
    length: int


class Segment(NamedTuple):
    """Consecutive tokens of one row. A state is kept behind the last one or behind none."""

    row: int
    first: int
    """Its first token in the step."""
    length: int

    @property
    def last(self) -> int:
        return self.first + self.length - 1


@dataclass(frozen=True)
class ShortTile:
    """Rows of equal length that are computed side by side, token by token."""

    rows: tuple[RowTokens, ...]


@dataclass(frozen=True)
class LongTile:
    """Rows that are computed side by side, segment by segment."""

    rows: tuple[RowTokens, ...]
    waves: tuple[tuple[Segment, ...], ...]
    """Wave i has the i-th segments of the first rows, in their order."""


def short_tiles(lens: Sequence[int], most_rows: int) -> Iterator[ShortTile]:
    """Tiles of at most `most_rows` of the short rows that have tokens; `lens` are the new tokens of every row."""
    by_length: dict[int, list[RowTokens]] = {}
    for row in rows_of(lens):
        if row.length <= SHORT_ROW:
            by_length.setdefault(row.length, []).append(row)
    for rows in by_length.values():
        for start in range(0, len(rows), most_rows):
            yield ShortTile(tuple(rows[start : start + most_rows]))


def long_rows(lens: Sequence[int]) -> tuple[RowTokens, ...]:
    """The long rows; `lens` are the new tokens of every row."""
    return tuple(row for row in rows_of(lens) if row.length > SHORT_ROW)


def long_tiles(lens: Sequence[int], kept: Sequence[int], chunk: int, most_rows: int) -> Iterator[LongTile]:
    """Tiles of at most `most_rows` of the long rows. `kept` has the slot of every token's state, 0 for none; it is
    empty if no state is kept."""
    return tiles_of(long_rows(lens), kept, chunk, most_rows)


def tiles_of(rows: Iterable[RowTokens], kept: Sequence[int], chunk: int, most_rows: int) -> Iterator[LongTile]:
    """Tiles of at most `most_rows` of these rows; see `long_tiles`."""
    cut = [(row, cut_row(row, kept, chunk)) for row in rows]
    cut.sort(key=lambda each: -len(each[1]))
    for start in range(0, len(cut), most_rows):
        members = cut[start : start + most_rows]
        waves = tuple(
            tuple(segments[index] for _, segments in members if index < len(segments))
            for index in range(len(members[0][1]))
        )
        yield LongTile(tuple(row for row, _ in members), waves)


def rows_of(lens: Sequence[int]) -> Iterator[RowTokens]:
    """The rows that have tokens; `lens` are the new tokens of every row."""
    first = 0
    for row, length in enumerate(lens):
        if length:
            yield RowTokens(row, first, length)
        first += length


def cut_row(row: RowTokens, kept: Sequence[int], chunk: int) -> list[Segment]:
    """Cuts a row where a state is kept, and after `chunk` tokens; `kept` is that of `long_tiles`."""
    segments, first = [], row.first
    for token in range(row.first, row.first + row.length):
        length = token + 1 - first
        if length == chunk or (kept and kept[token]) or token + 1 == row.first + row.length:
            segments.append(Segment(row.row, first, length))
            first = token + 1
    return segments
