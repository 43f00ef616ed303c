"""The keys of a step's windows: those of the context, from rings in states, and the new ones, in one scratch.

    scratch    | ring of row 0 | ring of row 1 | ... | new keys of all tokens of the step |

The key of position p is at p % window of a ring. A ring without context has zeros, which nothing reads. Does not know
attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.compressed.layout import NewTokens, kept_positions
from sightline.core.lengths import moved


@dataclass(frozen=True, eq=False)
class KeptRings:
    """The rings that are kept."""

    places: Tensor
    """[num_kept * window] int64: their keys in the scratch."""
    slots: Tensor
    """[num_kept] int64."""


@dataclass(frozen=True, eq=False)
class WindowKeys:
    """A planned step's keys."""

    scratch: Tensor
    """[num_rings * window + num_tokens, head_dim] of the cache's dtype."""
    read_slots: Tensor | None
    """[num_rings] int64; None if there is no context."""
    num_ring_keys: int
    kept: KeptRings | None

    def fill(self, keys: Tensor, plane: Tensor | None) -> None:
        """Fills the scratch, and keeps the rings behind kept tokens in `plane` [num_slots, window, head_dim], a
        layer's, which is None if there are no states. keys [num_tokens, head_dim]."""
        if plane is not None and self.read_slots is not None:
            rings = self.scratch[: self.num_ring_keys].view(-1, *plane.shape[1:])
            torch.index_select(plane, 0, self.read_slots, out=rings)
        self.scratch[self.num_ring_keys :] = keys
        if plane is not None and self.kept is not None:
            found = self.scratch.index_select(0, self.kept.places)
            plane.index_copy_(0, self.kept.slots, found.view(-1, *plane.shape[1:]))


def plan_window_keys(
    window: int, rows: Sequence[NewTokens], kept: Sequence[int], read_slots: Tensor | None, scratch: Tensor, tokens: int
) -> WindowKeys:
    """Plans a step of `tokens` tokens, padding included, into the first places of `scratch`. `read_slots` are those of
    `rows`; None if no row has a context."""
    num_ring_keys = 0 if read_slots is None else len(rows) * window
    return WindowKeys(
        scratch[: num_ring_keys + tokens],
        read_slots,
        num_ring_keys,
        _kept_rings(window, rows, kept, num_ring_keys, scratch.device) if kept else None,
    )


def _kept_rings(
    window: int, rows: Sequence[NewTokens], kept: Sequence[int], num_ring_keys: int, device: torch.device
) -> KeptRings | None:
    facts = [
        (position, row.place, row.context, num_ring_keys + row.first, kept[row.token(position)])
        for row in rows
        for position in kept_positions(row, kept)
    ]
    if not facts:
        return None
    positions, places, contexts, firsts, slots = moved(list(zip(*facts, strict=True)), device)
    ring = torch.arange(window, device=device)
    newest = positions.unsqueeze(1) - (positions.unsqueeze(1) - ring).remainder(window)
    found = key_places(newest, places.unsqueeze(1), contexts.unsqueeze(1), firsts.unsqueeze(1), window)
    return KeptRings(found.flatten(), slots)


def key_places(positions: Tensor, rows: Tensor, contexts: Tensor, firsts: Tensor, window: int) -> Tensor:
    """Where keys are in the scratch, by their positions; all int64 and broadcast together.

    `rows` are places among the rows with tokens, `firsts` where the new keys of each begin. A position below 0 gives a
    place in the ring, which is there if the row has one.
    """
    return torch.where(positions < contexts, rows * window + positions.remainder(window), firsts + positions - contexts)
