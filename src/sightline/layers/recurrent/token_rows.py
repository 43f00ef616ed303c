"""The part of a projection's output that a recurrence reads, with the features of each token contiguous."""

from __future__ import annotations

from torch import Tensor

from sightline.layers.scratch import Scratch


class ContiguousTokens:
    """A part of a projection's output: a view of it if that is row-major, otherwise a copy."""

    def __init__(self, scratch: Scratch, name: str, projected: Tensor, part: Tensor) -> None:
        """`projected` [num_tokens, features] is a buffer of `scratch`, and `part` a view of some of its features."""
        # Taken even if unused, so that the largest step reserves it.
        rows = scratch.take_rows(name, part.shape[1])
        self._part = part
        self._is_copy = not projected.is_contiguous()
        self.rows = rows if self._is_copy else part

    def fill(self) -> None:
        """Makes `rows` valid after the projection has been written."""
        if self._is_copy:
            self.rows.copy_(self._part)
