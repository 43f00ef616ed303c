"""The free list: which pages of a pool are owned, and their reference counts.

Every page is free, or owned with a positive reference count, or the padding page. A page's generation changes each time
the page is handed out and is never reused, in this pool or another. Does not know what a page holds.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sightline.core.config import PADDING_PAGES
from sightline.core.errors import OutOfPages

_generations = itertools.count(1)


class PageAllocator:
    """Hands out pages 1 .. num_pages - 1; page 0 is the padding page and is never handed out."""

    def __init__(self, num_pages: int) -> None:
        if num_pages != 0 and num_pages <= PADDING_PAGES:
            raise ValueError(f"expected more than {PADDING_PAGES} pages, or none at all, got {num_pages}")
        self._num_pages = num_pages
        self._free = list(range(num_pages - 1, PADDING_PAGES - 1, -1))
        self._owners = array("q", bytes(8 * num_pages))
        self.owner_counts: NDArray[np.int64] = np.asarray(self._owners)
        """A live view of the reference counts of all pages: the same memory as an array of numpy."""
        self._generations = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Pages that can be owned."""
        return max(0, self._num_pages - PADDING_PAGES)

    def owners(self, page: int) -> int:
        """The reference count of a page; 0 if it is free."""
        return self._owners[page]

    def generation(self, page: int) -> int:
        """Changes when the page is handed out, and when its contents are given up: see `renew`."""
        return self._generations[page]

    def renew(self, pages: Iterable[int]) -> None:
        """Changes the generation of pages whose owner will write other entries into them, so that stale references
        show."""
        generation = next(_generations)
        for page in pages:
            self._generations[page] = generation

    def allocate(self, count: int) -> tuple[int, ...]:
        """Returns `count` pages with one owner each. Raises `OutOfPages`, and takes none, if there are too few."""
        if count < 0:
            raise ValueError(f"expected a count of at least 0, got {count}")
        if count > len(self._free):
            raise OutOfPages(f"expected {count} free pages, got {len(self._free)} of {self.num_usable}")
        pages = tuple([self._free.pop() for _ in range(count)])
        generation = next(_generations)
        for page in pages:
            self._owners[page] = 1
            self._generations[page] = generation
        return pages

    def allocate_one(self) -> int:
        """Does as `allocate` for a single page, in a fraction of the time."""
        if not self._free:
            raise OutOfPages(f"expected 1 free page, got 0 of {self.num_usable}")
        page = self._free.pop()
        self._owners[page] = 1
        self._generations[page] = next(_generations)
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to pages that already have one."""
        pages = tuple(pages)
        self._require_owned(pages, leaving=False)
        for page in pages:
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> tuple[int, ...]:
        """Removes an owner; returns the pages that became free."""
        pages = tuple(pages)
        self._require_owned(pages, leaving=True)
        freed = []
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                freed.append(page)
        self._free.extend(reversed(freed))
        return tuple(freed)

    def release_one(self, page: int) -> bool:
        """Does as `release` for a single page; True if it became free."""
        if not PADDING_PAGES <= page < self._num_pages or not self._owners[page]:
            self._require_owned((page,), leaving=True)
        self._owners[page] -= 1
        if self._owners[page]:
            return False
        self._free.append(page)
        return True

    def _require_owned(self, pages: tuple[int, ...], *, leaving: bool) -> None:
        named = Counter(pages) if len(pages) > 1 else dict.fromkeys(pages, 1)
        for page, times in named.items():
            if not PADDING_PAGES <= page < self._num_pages:
                raise ValueError(f"expected a page from {PADDING_PAGES} to {self._num_pages - 1}, got {page}")
            if self._owners[page] < (times if leaving else 1):
                raise ValueError(f"page {page} has {self._owners[page]} owners and is named {times} times")
