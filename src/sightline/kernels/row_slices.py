"""Rows of a large tensor, a slice after the other, so that what is computed in fp32 on the way takes little memory."""

from __future__ import annotations

from collections.abc import Iterator

ROWS = 512
"""The rows of a slice. A decode step has fewer."""


def row_slices(num_rows: int) -> Iterator[slice]:
    """Slices that cover the rows in order."""
    return (slice(first, min(first + ROWS, num_rows)) for first in range(0, num_rows, ROWS))
