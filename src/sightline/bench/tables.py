"""Tables of reports, as Markdown that also reads well in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NONE = "–"
"""A cell without a value."""


def markdown_table(heading: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table, every column padded to its widest cell.

    `heading` has " | " between columns. A short row is filled with empty cells.
    """
    names = heading.split(" | ")
    cells = [names, *([*row, *[""] * (len(names) - len(row))] for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    padded.insert(1, ["-" * width for width in widths])
    return [f"| {' | '.join(row)} |" for row in padded]
