"""The tiles of a step as tensors of indices: where tokens, tails and states are read and written.

Made once per step, for all layers. Does not know what is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sightline.attention.contract import StateSlots
from sightline.attention.recurrent.segments import LongTile, RowTokens, Segment
from sightline.core.lengths import moved


class PlaceList(NamedTuple):
    """Indices along the first dimension of a tensor."""

    run: slice | None
    """The same indices as a slice; None if they do not follow each other."""
    indices: Tensor
    """[count] int64; empty if they follow each other."""

    @staticmethod
    def at(indices: Sequence[int], device: torch.device) -> PlaceList:
        first, count = (indices[0], len(indices)) if indices else (0, 0)
        if list(indices) == list(range(first, first + count)):
            return PlaceList(slice(first, first + count), torch.empty(0, dtype=torch.int64, device=device))
        return PlaceList(None, moved([indices], device)[0])

    def of(self, values: Tensor) -> Tensor:
        """[count, ...]: a view if the indices follow each other, otherwise a copy."""
        return values[self.run] if self.run is not None else values.index_select(0, self.indices)

    def put(self, target: Tensor, values: Tensor) -> None:
        """Copies `values` to these places of `target`."""
        if self.run is not None:
            target[self.run] = values
        else:
            target.index_copy_(0, self.indices, values.to(target.dtype))


class Kept(NamedTuple):
    """The rows whose states are kept, and the slots that keep them."""

    rows: PlaceList | None
    """The rows whose states are kept; None if all are."""
    slots: Tensor
    """[count] int64: the slot of each; never 0."""

    def put(self, plane: Tensor, states: Tensor) -> None:
        """Copies the states of these rows, out of `states` [rows, ...], to a layer's plane [slots, ...]."""
        plane.index_copy_(0, self.slots, states if self.rows is None else self.rows.of(states))


class StatesInPlace(NamedTuple):
    """States that are read from their slots and written to others, without a copy: the host knows the slots."""

    read_slots: tuple[int, ...]
    """[rows]."""
    write_slots: tuple[tuple[int, ...], ...]
    """Per token: the slot of each row's state, 0 for a state that is not kept."""

    def sources(self, plane: Tensor) -> list[Tensor]:
        """The states that the rows begin with."""
        return [plane[slot] for slot in self.read_slots]

    def targets(self, token: int, plane: Tensor, scratch: Tensor) -> list[Tensor]:
        """Returns where to write the states behind a token: slots, or `scratch` [rows, ...] if they are not kept."""
        return [plane[slot] if slot else scratch[row] for row, slot in enumerate(self.write_slots[token])]


class ShortRows(NamedTuple):
    """Rows of `length` tokens each, side by side."""

    tokens: PlaceList
    """The rows' tokens in the step, row after row."""
    num_rows: int
    length: int
    read_slots: Tensor | None
    """[rows] int64: the states that they begin with; None if these are empty."""
    kept: tuple[Kept | None, ...]
    """The states that are kept behind the i-th token of the rows."""

    def of(self, values: Tensor) -> Tensor:
        """[rows, tokens, ...], from values of all tokens of the step."""
        return self.tokens.of(values).view(self.num_rows, self.length, *values.shape[1:])

    def tails(self, plane: Tensor | None, channels: int, width: int) -> Tensor:
        """[rows, channels, width - 1] fp32: the inputs of a convolution that the rows begin with, from a layer's
        plane."""
        if plane is None or self.read_slots is None:
            shape = (self.num_rows, channels, width - 1)
            return torch.zeros(shape, dtype=torch.float32, device=self.tokens.indices.device)
        return plane.index_select(0, self.read_slots)

    def keep_tails(self, plane: Tensor | None, window: Tensor, width: int) -> None:
        """Writes the tails that are kept out of `window` [rows, channels, width - 1 + tokens] to a layer's plane."""
        for token, kept in enumerate(self.kept):
            if kept is not None and plane is not None:
                kept.put(plane, window[:, :, token + 1 : token + width])


@dataclass(frozen=True, eq=False)
class Windows:
    """The inputs of a convolution of several rows: for each row, its tail and then its tokens."""

    tokens: PlaceList
    """The rows' tokens in the step."""
    num_rows: int
    length: int | None
    """The tokens of each row; None if rows have different numbers of them, and follow each other as one."""
    num_places: int
    """All inputs of all rows."""
    token_places: PlaceList
    """The tokens, in these inputs."""
    tail_places: PlaceList
    """The tails, in these inputs."""
    kept_places: Tensor
    """[kept * (width - 1)] int64: the tails that are kept, in these inputs."""
    kept: Kept | None
    """The slots of these tails; None if none is kept."""

    def fill(self, x: Tensor, tails: Tensor | None, width: int) -> Tensor:
        """[rows, width - 1 + length, channels] fp32, where rows that follow each other count as one.

        x [num_tokens of the step, channels]; tails [rows, channels, width - 1], or None if they are empty.
        """
        channels, before = x.shape[1], width - 1
        window = x.new_empty(self.num_places, channels, dtype=torch.float32)
        if self.length is not None:
            window = window.view(self.num_rows, before + self.length, channels)
            window[:, before:] = self.tokens.of(x).view(self.num_rows, self.length, channels)
            window[:, :before] = 0.0 if tails is None else tails.transpose(1, 2)
            return window
        self.token_places.put(window, self.tokens.of(x).float())
        flat = window.new_zeros(self.num_rows * before, channels)
        if tails is not None:
            flat.view(self.num_rows, before, channels).copy_(tails.transpose(1, 2))
        self.tail_places.put(window, flat)
        return window.unsqueeze(0)

    def keep(self, plane: Tensor, window: Tensor, width: int) -> None:
        """Writes the tails that are kept to a layer's plane [slots, channels, width - 1]."""
        if self.kept is not None:
            channels = window.shape[2]
            tails = window.view(-1, channels).index_select(0, self.kept_places).view(-1, width - 1, channels)
            self.kept.put(plane, tails.transpose(1, 2))


@dataclass(frozen=True, eq=False)
class Block:
    """Segments of several waves, padded to one width."""

    num_segments: int
    width: int
    inputs: PlaceList
    """[num_segments * width]: the tokens in the tile's inputs. Padding repeats a token of the same segment."""
    tokens: PlaceList
    """[num_segments * width]: the same tokens in the step."""
    padding: Tensor | None
    """[num_segments, width] bool; None if there is none."""
    results: PlaceList | None
    """The block's outputs without padding; None if it has none."""
    targets: PlaceList
    """The tokens of these outputs, in the step."""
    waves: tuple[tuple[slice, Kept | None], ...]
    """The segments of each wave, and the states that are kept behind them."""


class LayoutMaker:
    """Makes the indices of one step."""

    def __init__(self, states: StateSlots | None, device: torch.device) -> None:
        self._states = states
        self._device = device

    def tokens(self, rows: Sequence[RowTokens]) -> PlaceList:
        """The tokens of the rows, row after row."""
        return PlaceList.at([token for row in rows for token in _tokens(row)], self._device)

    def places(self, rows: Sequence[RowTokens], gap: int) -> PlaceList:
        """The tokens of the rows if these follow each other with `gap` places between them."""
        starts = _starts(rows, gap)
        return PlaceList.at(
            [place for row, start in zip(rows, starts, strict=True) for place in range(start, start + row.length)],
            self._device,
        )

    def read_slots(self, rows: Sequence[RowTokens]) -> Tensor | None:
        """[rows] int64: the slots of the states that the rows begin with; None if they begin with nothing."""
        if self._states is None:
            return None
        return PlaceList.at([row.row for row in rows], self._device).of(self._states.read_slots)

    def kept_host(self) -> tuple[int, ...]:
        """The slot of every token's state, 0 for none; empty if no state is kept."""
        return () if self._states is None else self._states.kept_host

    def kept(self, tokens: Sequence[int]) -> Kept | None:
        """The states that are kept behind these tokens, one of each row; None if there is none."""
        if self._states is None:
            return None
        slots = self._states.kept_host
        chosen = [index for index, token in enumerate(tokens) if slots[token]]
        if not chosen:
            return None
        places = PlaceList.at([tokens[index] for index in chosen], self._device)
        rows = None if len(chosen) == len(tokens) else PlaceList.at(chosen, self._device)
        return Kept(rows, places.of(self._states.write_slots))

    def short_rows(self, rows: Sequence[RowTokens]) -> ShortRows:
        """Rows of equal length."""
        length = rows[0].length
        kept = tuple(self.kept([row.first + token for row in rows]) for token in range(length))
        return ShortRows(self.tokens(rows), len(rows), length, self.read_slots(rows), kept)

    def in_place(self, rows: Sequence[RowTokens]) -> StatesInPlace | None:
        """The slots of rows of equal length, if any; on a CPU, where the host reads them without waiting."""
        if self._states is None:
            return None
        read, kept = self._states.read_slots.tolist(), self._states.kept_host
        return StatesInPlace(
            tuple(read[row.row] for row in rows),
            tuple(tuple(kept[row.first + token] for row in rows) for token in range(rows[0].length)),
        )

    def windows(self, rows: Sequence[RowTokens], width: int) -> Windows:
        """The inputs of a convolution over `width` tokens."""
        before, is_equal = width - 1, len({row.length for row in rows}) == 1
        tails: list[int] = []
        places: list[int] = []
        kept: list[int] = []
        first = 0
        slots = self.kept_host()
        for row in rows:
            tails += range(first, first + before)
            places += range(first + before, first + before + row.length)
            # The tail behind a token ends with it.
            kept += [
                place
                for index, token in enumerate(_tokens(row))
                if slots and slots[token]
                for place in range(first + index + 1, first + index + 1 + before)
            ]
            first += before + row.length
        tokens = [token for row in rows for token in _tokens(row) if slots and slots[token]]
        return Windows(
            tokens=self.tokens(rows),
            num_rows=len(rows),
            length=rows[0].length if is_equal else None,
            num_places=first,
            token_places=PlaceList.at(places, self._device),
            tail_places=PlaceList.at(tails, self._device),
            kept_places=moved([kept], self._device)[0],
            kept=self.kept(tokens),
        )

    def blocks(self, tile: LongTile, gap: int, most_segments: int, *, even: bool) -> tuple[Block, ...]:
        """The waves of a tile, those of equal width together, up to `most_segments`.

        Rows of the tile's inputs have `gap` unused places between them; `even` pads segments to a power of 2.
        """
        starts = dict(zip([row.row for row in tile.rows], _starts(tile.rows, gap), strict=True))
        shifts = {row.row: starts[row.row] - row.first for row in tile.rows}
        blocks: list[Block] = []
        for width, group in itertools.groupby(tile.waves, lambda wave: _width(wave, even=even)):
            waves: list[tuple[Segment, ...]] = []
            for wave in group:
                if waves and sum(map(len, waves)) + len(wave) > most_segments:
                    blocks.append(self._block(waves, width, shifts))
                    waves = []
                waves.append(wave)
            blocks.append(self._block(waves, width, shifts))
        return tuple(blocks)

    def _block(self, waves: Sequence[Sequence[Segment]], width: int, shifts: Mapping[int, int]) -> Block:
        segments = [segment for wave in waves for segment in wave]
        # Padding repeats a token of its own row, so that no row depends on what another one holds.
        spread = [token for each in segments for token in (*_tokens(each), *[each.first] * (width - each.length))]
        shift = [shifts[each.row] for each in segments for _ in range(width)]
        real = [index * width + place for index, each in enumerate(segments) for place in range(each.length)]
        bounds = [0, *itertools.accumulate(map(len, waves))]
        is_padded = len(real) < len(spread)
        padding = torch.tensor([[place >= each.length for place in range(width)] for each in segments])
        return Block(
            num_segments=len(segments),
            width=width,
            inputs=PlaceList.at([token + by for token, by in zip(spread, shift, strict=True)], self._device),
            tokens=PlaceList.at(spread, self._device),
            padding=padding.to(self._device) if is_padded else None,
            results=PlaceList.at(real, self._device) if is_padded else None,
            targets=PlaceList.at([token for each in segments for token in _tokens(each)], self._device),
            waves=tuple(
                (slice(start, stop), self.kept([each.last for each in wave]))
                for wave, (start, stop) in zip(waves, itertools.pairwise(bounds), strict=True)
            ),
        )


def _tokens(row: RowTokens | Segment) -> range:
    return range(row.first, row.first + row.length)


def _starts(rows: Sequence[RowTokens], gap: int) -> list[int]:
    """Returns the place where each row begins, if rows follow each other with `gap` places between them."""
    return [index * gap + sum(each.length for each in rows[:index]) for index in range(len(rows))]


def _width(wave: Sequence[Segment], *, even: bool) -> int:
    longest = max(segment.length for segment in wave)
    return 1 << (longest - 1).bit_length() if even else longest
