"""Row lengths of a batch on the host and on the device, and helpers for its tensors.

Knows numbers and tensors. Does not know rows or pools.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from sightline.core.errors import BatchError
from sightline.core.transfer import sent

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class Lengths:
    """One length per row. The device copy is authoritative."""

    device: Tensor
    """[num_rows] int64."""
    bound: tuple[int, ...]
    """Upper bound per row on the host; always present."""
    host: tuple[int, ...] | None
    """Exact host copy, or None if only the device knows."""

    def __post_init__(self) -> None:
        if len(self.bound) != self.num_rows or (self.host is not None and len(self.host) != self.num_rows):
            raise ValueError(
                f"expected bounds and host copies of {self.num_rows} lengths, got {self.bound} and {self.host}"
            )

    @property
    def num_rows(self) -> int:
        return self.device.shape[0]

    def exact(self) -> tuple[int, ...]:
        """Returns the exact host copy; a backend that needs it declares so in its capability row."""
        if self.host is None:
            raise ValueError("expected lengths that the host knows, got device-only lengths")
        return self.host

    def bounded(self, bound: Sequence[int], *, known: bool) -> Lengths:
        """The same lengths under looser bounds; unless `known`, as if only the device knew them."""
        short = [row for row, (most, least) in enumerate(zip(bound, self.bound, strict=True)) if most < least]
        if short:
            raise ValueError(f"expected bounds of at least {self.bound}, got {tuple(bound)}")
        return Lengths(self.device, tuple(bound), self.host if known else None)


def picked(values: Sequence[Item], places: Sequence[int]) -> tuple[Item, ...]:
    """The values at these indices, picked in one call."""
    if len(places) > 1:
        found: tuple[Item, ...] = itemgetter(*places)(values)
        return found
    return tuple([values[place] for place in places])


def moved(columns: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, ...]:
    """Copies each column to a tensor [length] int64, adjacent in memory, by one copy that does not wait for a GPU."""
    sizes = [len(each) for each in columns]
    joined = np.empty(sum(sizes), dtype=np.int64)
    # Reads lists in a third of numpy's time.
    struct.pack_into(f"{len(joined)}q", joined.data, 0, *itertools.chain.from_iterable(columns))
    return sent([joined], device)[0].split_with_sizes(sizes)


Continued: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The places of tokens that steps in flight choose: in a batch, in increasing order, and in what they choose."""


def check_unread(continued: Continued, chosen: Tensor | None, awaited: int) -> None:
    """Each token that the host does not know must be one of the chosen or of the awaited, and no other row's."""
    unread, num_chosen = continued[1], awaited if chosen is None else chosen.shape[0]
    if chosen is not None and awaited:
        raise BatchError("awaited", None, "0 in a batch with chosen tokens", awaited, "give one of the two")
    if chosen is not None and chosen.dtype is not torch.int64:
        raise BatchError("chosen", None, "int64", chosen.dtype)
    if chosen is not None and _go_on(continued, chosen):
        return
    if min(unread) < 0 or max(unread) >= num_chosen:
        raise BatchError("unread", None, f"among the {num_chosen} tokens that are being chosen", list(unread))
    if len(set(unread)) != len(unread):
        raise BatchError("unread", None, "each token that is being chosen once", list(unread))


def put_chosen(tokens: Tensor, continued: Continued, on_device: tuple[Tensor, ...], chosen: Tensor) -> None:
    """Copies chosen tokens into a batch's, in stream order. `on_device` begins with the same numbers as `continued`."""
    count = len(continued[0])
    if _go_on(continued, chosen):
        # Slicing takes as long as the copy.
        (tokens if tokens.shape[0] == count else tokens[:count]).copy_(chosen)
    else:
        tokens.index_copy_(0, on_device[0][:count], chosen.index_select(0, on_device[1][:count]))


def _go_on(continued: Continued, chosen: Tensor) -> bool:
    """True if each chosen token goes on where it was, as in most steps of decode."""
    places, sources = continued
    return places == sources and places[-1] + 1 == len(places) == chosen.shape[0]


def checked_positions(
    index: int, tree: Tensor | None, positions: Sequence[int] | None, first: int, query_len: int
) -> Sequence[int]:
    """Checks the mask and the positions of the row at `index`, whose first new token is at `first`, and returns them.

    Without positions of their own, tokens follow one another.
    """
    if tree is not None and (tree.shape != (query_len, query_len) or tree.dtype != torch.bool):
        got = f"{tuple(tree.shape)} {tree.dtype}"
        raise BatchError("masks", index, f"a tree of {query_len} × {query_len} booleans", got)
    if positions is None:
        return range(first, first + query_len)
    if tree is None:
        raise BatchError("positions", index, "none: only a tree has positions of its own", list(positions))
    in_row = all(first <= position < first + query_len for position in positions)
    if len(positions) != query_len or not in_row:
        expected = f"{query_len} positions, one for each token, from {first} to {first + query_len - 1}"
        raise BatchError("positions", index, expected, list(positions))
    return positions


def extend(values: Tensor, count: int, fill: int) -> Tensor:
    return torch.cat([values, values.new_full((count,), fill)])


def pad_lengths(lengths: Lengths, count: int) -> Lengths:
    host = None if lengths.host is None else lengths.host + (0,) * count
    return Lengths(extend(lengths.device, count, 0), lengths.bound + (0,) * count, host)


def slice_lengths(lengths: Lengths, rows: slice) -> Lengths:
    host = None if lengths.host is None else lengths.host[rows]
    return Lengths(lengths.device[rows], lengths.bound[rows], host)


def take_lengths(lengths: Lengths, rows: Sequence[int]) -> Lengths:
    index = torch.tensor(list(rows), dtype=torch.int64, device=lengths.device.device)
    host = None if lengths.host is None else tuple(lengths.host[row] for row in rows)
    return Lengths(lengths.device[index], tuple(lengths.bound[row] for row in rows), host)


def placed_lengths(lengths: Lengths, memory: Lengths) -> Lengths:
    """The lengths copied into the tensor of `memory`, with their own bounds."""
    return Lengths(memory.device.copy_(lengths.device), lengths.bound, lengths.host)
