"""The cache of a rank that follows: which pages and slots its rows have is told to it, with every step.

It has the pools, tables and lengths of any store. Nothing is allocated in it: the leading rank did that, and checked
what a page or a state is used for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sightline.cache.pages import PageAllocator
from sightline.cache.store import CacheStore, NetworkCache
from sightline.core.batch import PADDING_SLOT
from sightline.core.errors import RankLostError


class ToldAllocator(PageAllocator):
    """The pages of a rank that follows: each has the one owner that the leading rank knows, and none is handed out."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.owner_counts[:] = 1

    def allocate(self, count: int) -> tuple[int, ...]:
        raise RankLostError(f"expected to be told of {count} pages or states, got an order that names none")

    def allocate_one(self) -> int:
        return self.allocate(1)[0]

    def release_one(self, page: int) -> bool:
        del page
        return False


class ToldStates(Protocol):
    """The slots of the states that a row of a step reads and writes."""

    @property
    def read(self) -> int:
        """The slot of the state behind its context; that of padding if it has none."""

    @property
    def positions(self) -> Sequence[int]:
        """The numbers of tokens behind which it writes a state."""

    @property
    def slots(self) -> Sequence[int]: ...


class ToldCache:
    """Applies what the leading rank says of rows to a store."""

    def __init__(self, store: CacheStore) -> None:
        self._store = store
        self._network: NetworkCache = store.main

    def put_pages(self, pool: int, row: int, first: int, pages: Sequence[int]) -> None:
        """Gives a row these pages from a place on, in a pool of the model."""
        table = self._network.pools[pool].table
        if not 0 <= first <= table.num_owned(row):
            raise RankLostError(
                f"expected pages of row {row} from place {table.num_owned(row)} or before, got some from {first}: an "
                "order was lost"
            )
        table.trim(row, first)
        table.append(row, pages)

    def begin_row(self, row: int, context_len: int, told: ToldStates | None) -> None:
        """Lets the row's next step begin behind `context_len` tokens, with the states that are told in a model that
        keeps some."""
        self._network.lengths.fill(row, context_len)
        states = self._network.states
        if (states is None) != (told is None):
            raise RankLostError(f"expected states of row {row} from the leading rank if the model has some, got {told}")
        if states is not None and told is not None:
            read = {context_len: told.read} if told.read != PADDING_SLOT else {}
            states.tell(row, read, dict(zip(told.positions, told.slots, strict=True)))
