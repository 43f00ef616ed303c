"""Which guesses of a row are right: those that the model chooses, from the last known token on.

A row with a tree is a row of several new tokens of which each sees its ancestors alone:

    known   quick ─┬─ brown ── fox      sees    quick  brown  fox  red     position
                   └─ red               quick     x                        0
                                        brown     x      x                 1
                                        fox       x      x     x           2
                                        red       x                   x    1
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sightline.core.batch import MaskKind, RowMask
from sightline.scheduler.sequence import ScheduledRow
from sightline.scheduler.trees import ROOT, depths


def tree_mask(row: ScheduledRow) -> RowMask:
    """The mask of a row with a tree behind its one known token."""
    seen = np.eye(row.num_tokens, dtype=np.bool_)
    for guess, parent in enumerate(row.draft_parents, start=1):
        seen[guess] |= seen[parent + 1]
    return RowMask(MaskKind.TREE, torch.from_numpy(seen))


def tree_positions(row: ScheduledRow) -> list[int]:
    """The positions of a row with a tree: those that its tokens have if they are right."""
    return [row.context_len, *(row.context_len + depth for depth in depths(row.draft_parents))]


def right_guesses(row: ScheduledRow, chosen: Sequence[int]) -> Sequence[int]:
    """The guesses that are right, by index, from the last known token on.

    `chosen` are the tokens that were chosen behind that one and behind each guess.
    """
    if row.parents is None:
        num_right = 0
        while num_right < len(row.drafts) and row.drafts[num_right] == chosen[num_right]:
            num_right += 1
        return range(num_right)
    children = {each: guess for guess, each in enumerate(zip(row.parents, row.drafts, strict=True))}
    path: list[int] = []
    place = ROOT
    while (guess := children.get((place, chosen[place + 1]))) is not None:
        path.append(guess)
        place = guess
    return path
