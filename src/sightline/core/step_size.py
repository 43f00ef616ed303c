"""The size of a step: how it is padded, and which bucket of a captured graph it fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sightline.core.batch import CAUSAL, StepWork
from sightline.core.batch_memory import StepShape


class StepSize(NamedTuple):
    """The size of a step without padding."""

    num_rows: int
    num_tokens: int
    longest: int
    """Most new tokens of a row."""
    is_causal: bool
    """True if every row has a causal mask."""

    @staticmethod
    def of(work: StepWork) -> StepSize:
        lens = work.query_lens
        return StepSize(len(lens), sum(lens), max(lens, default=0), work.masks.count(CAUSAL) == len(lens))

    @staticmethod
    def joined(sizes: Sequence[StepSize]) -> StepSize:
        """The size that all of some steps fit in."""
        num_rows, num_tokens, longest, are_causal = zip(*sizes, strict=True)
        return StepSize(max(num_rows), max(num_tokens), max(longest), all(are_causal))

    def padded(self, shape: StepShape | None) -> tuple[int, int]:
        """Rows and tokens of the step in a bucket of this shape, or without one."""
        return (self.num_rows, self.num_tokens) if shape is None else (shape.size, shape.size)
