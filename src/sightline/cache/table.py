"""Page tables: the pages of each sequence's row, with a version that changes when a page changes owner.

Owns the mapping and its versions. Does not own pages: the allocator does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sightline.core.batch import PADDING_ROW
from sightline.core.lengths import picked

_table_ids = itertools.count(1)


def next_table_id() -> int:
    """An identity that no other table of this process has."""
    return next(_table_ids)


class PageTable:
    """Rows of page numbers. Row 0 is the padding row: it holds the padding page and never changes."""

    def __init__(self, num_rows: int, max_pages: int, device: torch.device) -> None:
        self.table_id = next_table_id()
        self.num_rows = num_rows
        self.max_pages = max_pages
        self.pages = torch.zeros(num_rows + 1, max_pages, dtype=torch.int64, device=device)
        """[num_rows + 1, max_pages]: entries beyond a row's pages hold the padding page."""
        self._is_shared = device.type == "cpu"
        self.on_host = self.pages.numpy() if self._is_shared else np.zeros(tuple(self.pages.shape), dtype=np.int64)
        """The same numbers for the host; on a CPU the same memory, which takes a tenth of torch's time to write."""
        self._owned: list[list[int]] = [[] for _ in range(num_rows + 1)]
        self._versions = [0] * (num_rows + 1)

    def owned(self, row: int) -> tuple[int, ...]:
        """The pages of a row, in order."""
        return tuple(self._owned[row])

    def pages_of(self, row: int) -> Sequence[int]:
        """A live view of the row's pages: unlike `owned`, it changes with the row."""
        return self._owned[row]

    def page(self, row: int, index: int) -> int:
        """The `index`-th page of a row."""
        return self._owned[row][index]

    def num_owned(self, row: int) -> int:
        return len(self._owned[row])

    def version(self, row: int) -> int:
        """Changes whenever a page leaves the row. Growth does not change it, because earlier pages keep their owner."""
        return self._versions[row]

    def versions(self, rows: Sequence[int]) -> tuple[int, ...]:
        return picked(self._versions, rows)

    def append(self, row: int, pages: Sequence[int]) -> None:
        """Appends pages to a row."""
        self._require_writable(row)
        owned = self._owned[row]
        if len(owned) + len(pages) > self.max_pages:
            raise ValueError(f"expected at most {self.max_pages} pages in a row, got {len(owned)} + {len(pages)}")
        place = slice(len(owned), len(owned) + len(pages))
        self.on_host[row, place] = pages
        if not self._is_shared:
            self.pages[row, place] = torch.tensor(pages, dtype=torch.int64)
        owned.extend(pages)

    def trim(self, row: int, num_pages: int) -> tuple[int, ...]:
        """Removes the pages after the first `num_pages` from a row and returns them."""
        self._require_writable(row)
        if num_pages < 0:
            raise ValueError(f"expected at least 0 pages to keep in row {row}, got {num_pages}")
        pages = tuple(self._owned[row][num_pages:])
        if pages:
            self._zero(row, slice(num_pages, num_pages + len(pages)))
            del self._owned[row][num_pages:]
            self._versions[row] += 1
        return pages

    def clear(self, row: int) -> tuple[int, ...]:
        """Empties a row and returns its pages."""
        self._require_writable(row)
        pages = tuple(self._owned[row])
        self._zero(row, slice(len(pages)))
        self._owned[row] = []
        self._versions[row] += 1
        return pages

    def _zero(self, row: int, place: slice) -> None:
        self.on_host[row, place] = 0
        if not self._is_shared:
            self.pages[row, place] = 0

    def slots(self, rows: Tensor, entries: Tensor, page_size: int) -> Tensor:
        """Slots of entries. `rows` and `entries` have the same shape; entry e is in its row's page e // page_size."""
        page = self.pages[rows, entries.div(page_size, rounding_mode="floor")]
        return page * page_size + entries.remainder(page_size)

    def run(self, row: int, first: int, stop: int, page_size: int) -> slice | None:
        """The slots of a row's entries `first` to `stop` if they are contiguous, otherwise None."""
        pages = self._owned[row][first // page_size : -(-stop // page_size)]
        if not 0 <= first < stop or len(pages) != -(-stop // page_size) - first // page_size:
            raise ValueError(
                f"expected entries that row {row} has pages for, got {first} to {stop} of {len(pages)} pages"
            )
        if pages != list(range(pages[0], pages[0] + len(pages))):
            return None
        start = pages[0] * page_size + first % page_size
        return slice(start, start + stop - first)

    def _require_writable(self, row: int) -> None:
        if not PADDING_ROW < row < len(self._owned):
            raise ValueError(f"expected a row from 1 to {len(self._owned) - 1}, got {row}")
