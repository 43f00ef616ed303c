"""Rows whose new tokens form a tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sightline.core.batch import MaskKind, RowMask
from sightline.testing.conformance.rig import Row


def tree_row(context_len: int, parents: Sequence[int]) -> Row:
    """A row whose new tokens form a tree: each sees its ancestors, and its depth is its position.

    `parents` has the place of each token's parent, -1 for one that follows the context.
    """
    count = len(parents)
    tree, depths = torch.eye(count, dtype=torch.bool), [0] * count
    for child, parent in enumerate(parents):
        if parent >= 0:
            tree[child] |= tree[parent]
            depths[child] = depths[parent] + 1
    return Row(context_len, count, RowMask(MaskKind.TREE, tree), tuple(context_len + depth for depth in depths))
