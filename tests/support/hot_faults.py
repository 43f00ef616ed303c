"""Faults of making entries hot, by name: each is a way to fetch that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from torch import Tensor, zeros_like

from sightline.kernels import hot_entries
from sightline.kernels.hot_entries import FetchEntries, HotBuffer, TurnRows

_give, _fetch = hot_entries._give, hot_entries.fetch_entries


def evicting() -> FetchEntries:
    """Gives away slots of entries that are chosen."""

    def copy(buffer: HotBuffer, layer: int, turn: TurnRows, chosen: Tensor, slots: Tensor) -> None:
        with pytest.MonkeyPatch.context() as patch:
            unprotected = lambda empty, kept, *others: _give(empty, zeros_like(kept), *others)  # noqa: E731
            patch.setattr(hot_entries, "_give", unprotected)
            _fetch(buffer, layer, turn, chosen, slots)

    return copy


def late() -> FetchEntries:
    """Copies what is missing when the next entries are fetched."""
    waiting: list[tuple[Tensor, Tensor]] = []

    def copy(buffer: HotBuffer, layer: int, turn: TurnRows, chosen: Tensor, slots: Tensor) -> None:
        before = buffer.plane.clone()
        _fetch(buffer, layer, turn, chosen, slots)
        changed = (buffer.plane != before).any(1).nonzero().squeeze(1)
        arrived = buffer.plane[changed].clone()
        buffer.plane.copy_(before)
        for places, entries in waiting:
            buffer.plane[places] = entries
        waiting[:] = [(changed, arrived)]

    return copy


def of_another_row() -> FetchEntries:
    """Reads the map of places of another row."""

    def copy(buffer: HotBuffer, layer: int, turn: TurnRows, chosen: Tensor, slots: Tensor) -> None:
        mapped = TurnRows(turn.rows.clone(), turn.contexts, turn.firsts)
        mapped.rows[:-1] = mapped.rows[:-1].roll(1)
        _fetch(buffer, layer, mapped, chosen, slots)

    return copy


def by_another_layers_age() -> FetchEntries:
    """Gives away what another layer chose longest ago."""

    def copy(buffer: HotBuffer, layer: int, turn: TurnRows, chosen: Tensor, slots: Tensor) -> None:
        swapped = HotBuffer(**{**vars(buffer), "order": buffer.order.flip(0)})
        _fetch(swapped, layer, turn, chosen, slots)

    return copy


FAULTS: Mapping[str, tuple[Callable[[], FetchEntries], str]] = {
    "hot buffer evicts a chosen entry": (evicting, "another entry than the chosen one"),
    "miss copied after the read": (late, "another entry than the chosen one"),
    "map of another row": (of_another_row, "another entry than the chosen one"),
    "LRU age of another layer": (by_another_layers_age, "chosen later than one that stayed"),
}
"""Each with what a check of single fetches says about it."""
