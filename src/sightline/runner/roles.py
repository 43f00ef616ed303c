"""What a process is among the ranks that compute a model: alone, the leader, or one that follows.

leader     schedules, samples and plans; tells the others of every step before it runs it
follower   is told: it makes the same batch, plans it on its own, and runs it at the same time
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sightline.cache.pages import PageAllocator
from sightline.cache.store import CacheStore, NetworkCache
from sightline.cache.told import ToldAllocator
from sightline.cache.watcher import UNWATCHED, CacheWatcher
from sightline.core.batch import Batch, MaskKind
from sightline.core.errors import BatchError, RankLostError
from sightline.core.interruption import uninterrupted
from sightline.distributed.channels import OrderSender
from sightline.distributed.collectives import LONE, Collectives
from sightline.distributed.orders import (
    CopyOrder,
    MoveOrder,
    Order,
    PagesOfRow,
    StatesOfRow,
    StepOrder,
    StopOrder,
    TreeOfRow,
    packed,
)

logger = logging.getLogger("sightline")


class Companions:
    """The ranks that take part in a step beside this one. Here there are none."""

    @contextmanager
    def along(self, batch: Batch, halves: Sequence[Batch] = (), *, is_captured: bool = False) -> Iterator[None]:
        """Runs a step together with them, or its halves if it is cut in two. They must be launched already."""
        del batch, halves, is_captured
        yield


NOBODY = Companions()


class Role:
    """What a process needs for its part beside what every engine has. This is that of a process alone."""

    collectives: Collectives = LONE
    watcher: CacheWatcher = UNWATCHED
    """Hears of copies in the cache of the model."""
    make_allocator: Callable[[int], PageAllocator] = PageAllocator
    leads: bool = True
    """True if it decides what runs: it tries steps before it serves, and records them."""

    def companions(self, store: CacheStore) -> Companions:
        """Those that take part in the steps of the model. Here there are none."""
        del store
        return NOBODY

    def begin_serving(self) -> None:
        """Says that every step so far was to get ready."""

    def close(self) -> None:
        """Says that this process runs no further step."""


ALONE_ROLE = Role()


class Follows(Role):
    """A rank that is told what to run."""

    make_allocator = ToldAllocator
    leads = False

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives

    def companions(self, store: CacheStore) -> Companions:
        del store
        return Told(self.collectives)

    def close(self) -> None:
        self.collectives.close()


class Leads(Role):
    """The rank that tells the others."""

    def __init__(self, collectives: Collectives, sender: OrderSender) -> None:
        self.collectives = collectives
        self._sender = sender
        self._orders = Orders(sender)
        self._is_closed = False
        self.watcher = Teller(self._orders)

    def companions(self, store: CacheStore) -> Companions:
        """Waits until the others have loaded their parts too."""
        self._sender.wait_until_ready()
        return Led(self.collectives, self._orders, store.main)

    def begin_serving(self) -> None:
        """From now on, a rank that takes part in no step for long is lost: all kernels are compiled."""
        self._sender.begin_serving()

    def close(self) -> None:
        """Lets the other ranks end. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._orders.give(StopOrder)
        except RankLostError as error:
            logger.debug("the other ranks are not told of the end: %s", error)
        finally:
            self._sender.close()
            self.collectives.close()


class Orders:
    """Numbers orders and sends them. Once a step broke off, nothing more is sent: the ranks are at different places."""

    def __init__(self, sender: OrderSender) -> None:
        self._sender = sender
        self._number = 0
        self._broken: str | None = None

    def give(self, make: Callable[..., Order], *facts: object, **others: object) -> None:
        """Sends the next order, made from these facts."""
        if self._broken is not None:
            raise RankLostError(f"expected ranks that run the same steps, got a step that broke off: {self._broken}")
        self._number += 1
        self._sender.send(packed(make(self._number, *facts, **others)))

    def break_off(self, error: BaseException) -> str:
        """Says that a step ended early on this rank. Returns the cause: a rank that is gone, or else this error."""
        self._broken = self._broken or self._sender.why_lost() or f"{type(error).__name__}: {error}"
        return self._broken


class Teller(CacheWatcher):
    """Tells the other ranks of copies."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    def copies_page(self, pool: str, source: int, target: int, num_tokens: int) -> None:
        self._orders.give(CopyOrder, pool, source, target, num_tokens)

    def moves_entries(self, pool: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._orders.give(MoveOrder, pool, list(sources), list(targets))


class Told(Companions):
    """The other ranks, for one that follows: it gets the tokens of a step from the leader."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    @contextmanager
    def along(self, batch: Batch, halves: Sequence[Batch] = (), *, is_captured: bool = False) -> Iterator[None]:
        del is_captured
        for each in halves or (batch,):
            self._collectives.broadcast(each.tokens)
        yield


class Led(Companions):
    """The other ranks, for the leader: it tells them of a step, and gives them its tokens."""

    def __init__(self, collectives: Collectives, orders: Orders, network: NetworkCache) -> None:
        self._collectives = collectives
        self._orders = orders
        self._network = network
        self._told: dict[tuple[int, int], tuple[int, int]] = {}
        """By pool and row: the version of the row, and how many of its pages the others know."""

    @contextmanager
    def along(self, batch: Batch, halves: Sequence[Batch] = (), *, is_captured: bool = False) -> Iterator[None]:
        first_rows = halves[0].num_rows if halves else 0
        facts, trees = _facts(batch), _trees(batch)
        # The others cannot be called back from a step, so an interruption waits for its end.
        with uninterrupted():
            try:
                self._orders.give(StepOrder, *facts, *self._changes(batch), trees, first_rows, is_captured)
                for each in halves or (batch,):
                    self._collectives.broadcast(each.tokens)
                yield
            except Exception as error:
                cause = self._orders.break_off(error)
                raise RankLostError(f"a step of {batch.num_rows} rows that all ranks run broke off: {cause}") from error
            except BaseException as error:
                self._orders.break_off(error)
                raise

    def _changes(self, batch: Batch) -> tuple[list[PagesOfRow], list[StatesOfRow]]:
        """The pages that the rows got since the others were told, and the states of the step."""
        return self._pages(batch.work.table_rows), self._states(batch)

    def _pages(self, rows: Sequence[int]) -> list[PagesOfRow]:
        found = []
        for number, pool in enumerate(self._network.pools):
            table = pool.table
            for row in rows:
                version, count = self._told.get((number, row), (-1, 0))
                current, owned = table.version(row), table.num_owned(row)
                first = count if version == current else 0
                if (version, count) != (current, owned):
                    found.append(PagesOfRow(number, row, first, list(table.pages_of(row)[first:])))
                    self._told[number, row] = (current, owned)
        return found

    def _states(self, batch: Batch) -> list[StatesOfRow]:
        states, work = self._network.states, batch.work
        if states is None:
            return []
        reads = states.slots_to_read(work.table_rows, work.context_lens)
        kept, start, found = batch.pools[states.key].kept, 0, []
        for read, context_len, count in zip(reads, work.context_lens, work.query_lens, strict=True):
            slots = [(context_len + place + 1, slot) for place, slot in enumerate(kept[start : start + count]) if slot]
            found.append(StatesOfRow(read, [position for position, _ in slots], [slot for _, slot in slots]))
            start += count
        return found


def _facts(batch: Batch) -> tuple[object, ...]:
    """What a step order says of the rows of a batch."""
    work = batch.work
    if not batch.pools or any(mask.kind not in (MaskKind.CAUSAL, MaskKind.TREE) for mask in work.masks):
        raise BatchError("rows", None, "rows that generate, as several ranks compute them", "a text that is embedded")
    columns = (work.table_rows, work.context_lens, work.query_lens, work.num_logits, work.num_candidates)
    return (*(list(column) for column in columns), batch.num_rows, batch.num_tokens)


def _trees(batch: Batch) -> list[TreeOfRow]:
    found = []
    for index, (mask, positions) in enumerate(zip(batch.work.masks, batch.work.positions, strict=True)):
        if mask.tree is not None and positions is not None:
            sees = [each.nonzero().flatten().tolist() for each in mask.tree]
            found.append(TreeOfRow(index, list(positions), sees))
    return found
