"""What a process is among the ranks that compute a model: alone, the leader, or one that follows.

leader     schedules, samples and plans; tells the others of every step before it runs it
follower   is told: it makes the same batch, or that of its replica, plans it on its own, and runs it at the same time
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from sightline.attention.workspace import MAIN_LANE
from sightline.cache.pages import PageAllocator
from sightline.cache.store import CacheStore, NetworkCache
from sightline.cache.told import ToldAllocator
from sightline.cache.watcher import UNWATCHED, CacheWatcher
from sightline.core.batch import Batch
from sightline.core.errors import PlanError, RankLostError
from sightline.core.interruption import uninterrupted
from sightline.distributed.channels import OrderSender
from sightline.distributed.collectives import NO_LINKS, Links
from sightline.distributed.orders import CopyOrder, MoveOrder, Order, StepOrder, StopOrder, packed
from sightline.runner.replicas import Beside, idle_beside
from sightline.runner.telling import PartTeller

logger = logging.getLogger("sightline")
Join: TypeAlias = Callable[[Tensor], Tensor]
"""Makes the outputs of a step from those of this replica."""


class Companions:
    """The ranks that take part in a step beside this one. Here there are none."""

    @contextmanager
    def along(
        self, batch: Batch, beside: Sequence[Beside] = (), *, halves: Sequence[Batch] = (), is_captured: bool = False
    ) -> Iterator[Join]:
        """Runs a step together with them, or its halves if it is cut in two. Yields what joins its outputs with those
        of other replicas.

        `beside` has the step of each other replica; without it they run padding. The step must be launched already.
        """
        del batch, beside, halves, is_captured
        yield _as_they_are


def _as_they_are(outputs: Tensor) -> Tensor:
    return outputs


NOBODY = Companions()


class Role:
    """What a process needs for its part beside what every engine has. This is that of a process alone."""

    links: Links = NO_LINKS
    make_allocator: Callable[[int], PageAllocator] = PageAllocator
    leads: bool = True
    """True if it decides what runs: it tries steps before it serves, and records them."""

    @property
    def num_others(self) -> int:
        """Other replicas, whose rows and pages it keeps account of."""
        return self.links.place.num_replicas - 1 if self.leads else 0

    def watcher(self, replica: int) -> CacheWatcher:
        """Hears of copies in the model's cache of a replica."""
        del replica
        return UNWATCHED

    def companions(self, stores: Sequence[CacheStore], *, exchanges_rows: bool) -> Companions:
        """Those that take part in the steps of the model. Here there are none.

        `stores` has one for each replica. With `exchanges_rows`, replicas compute some layers together.
        """
        del stores, exchanges_rows
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

    def __init__(self, links: Links) -> None:
        self.links = links
        self.told = Told(links)
        """Must hear of every step before it runs."""

    def companions(self, stores: Sequence[CacheStore], *, exchanges_rows: bool) -> Companions:
        del stores, exchanges_rows
        return self.told

    def close(self) -> None:
        self.links.close()


class Leads(Role):
    """The rank that tells the others."""

    def __init__(self, links: Links, sender: OrderSender) -> None:
        self.links = links
        self._sender = sender
        self._orders = Orders(sender)
        self._is_closed = False

    def watcher(self, replica: int) -> CacheWatcher:
        return Teller(self._orders, replica)

    def companions(self, stores: Sequence[CacheStore], *, exchanges_rows: bool) -> Companions:
        """Waits until the others have loaded their parts too."""
        self._sender.wait_until_ready()
        networks = [store.main for store in stores]
        return Led(self.links, self._orders, networks, exchanges_rows=exchanges_rows)

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
            self.links.close()


class Orders:
    """Numbers orders and sends them. Once a step broke off, nothing more is sent: the ranks are at different places."""

    def __init__(self, sender: OrderSender) -> None:
        self._sender = sender
        self._number = 0
        self._broken: str | None = None

    def give(self, make: Callable[..., Order], *facts: object) -> None:
        """Sends the next order, made from these facts."""
        if self._broken is not None:
            raise RankLostError(f"expected ranks that run the same steps, got a step that broke off: {self._broken}")
        self._number += 1
        self._sender.send(packed(make(self._number, *facts)))

    def break_off(self, error: BaseException) -> str:
        """Says that a step ended early on this rank. Returns the cause: a rank that is gone, or else this error."""
        self._broken = self._broken or self._sender.why_lost() or f"{type(error).__name__}: {error}"
        return self._broken


class Teller(CacheWatcher):
    """Tells the ranks of a replica of copies."""

    def __init__(self, orders: Orders, replica: int) -> None:
        self._orders = orders
        self._replica = replica

    def copies_page(self, pool: str, source: int, target: int, num_tokens: int) -> None:
        self._orders.give(CopyOrder, self._replica, pool, source, target, num_tokens)

    def moves_entries(self, pool: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._orders.give(MoveOrder, self._replica, pool, list(sources), list(targets))


class Told(Companions):
    """The other ranks, for one that follows: the leader sends it tokens and, if it is the first of a replica, takes its
    outputs. It runs no step that it was not told of."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._order: StepOrder | None = None

    def hear(self, order: StepOrder) -> None:
        """Takes in what the next step is."""
        self._order = order

    @contextmanager
    def along(
        self, batch: Batch, beside: Sequence[Beside] = (), *, halves: Sequence[Batch] = (), is_captured: bool = False
    ) -> Iterator[Join]:
        del beside
        order, self._order = self._order, None
        if order is None:
            raise RankLostError("expected an order of the leading rank for every step, got a step without one")
        if len(order.parts) == 1:
            for each in halves or (batch,):
                self._links.everyone.broadcast(each.tokens)
            yield _as_they_are
            return
        ends = list(accumulate(part.padded_tokens for part in order.parts))
        stop, tokens = ends[self._links.place.replica.index], batch.tokens.new_empty(ends[-1])
        self._links.everyone.broadcast(tokens)
        batch.tokens.copy_(tokens[stop - batch.num_tokens : stop])
        if is_captured or not self._links.within.rank.leads:
            yield _as_they_are
        else:
            counts = [sum(part.num_logits) for part in order.parts]
            yield partial(self._links.across.gather, sizes=counts, dim=0)


class Led(Companions):
    """The other ranks, for the leader: it tells them of a step, gives them its tokens, and takes outputs."""

    def __init__(self, links: Links, orders: Orders, networks: Sequence[NetworkCache], *, exchanges_rows: bool) -> None:
        """`networks` has the model's cache of each replica."""
        self._links = links
        self._orders = orders
        self._others = tuple(networks[1:])
        self._tellers = tuple(map(PartTeller, networks))
        self._exchanges_rows = exchanges_rows

    def _launch_accounts(self, others: Sequence[Beside]) -> None:
        """Marks the steps of other replicas as running, in the accounts of their caches."""
        for network, other in zip(self._others, others, strict=True):
            network.lengths.launch(other.batch, MAIN_LANE)

    @contextmanager
    def along(
        self, batch: Batch, beside: Sequence[Beside] = (), *, halves: Sequence[Batch] = (), is_captured: bool = False
    ) -> Iterator[Join]:
        first_rows = halves[0].num_rows if halves else 0
        others = beside or [idle_beside(batch, each) for each in self._others]
        steps = (Beside(batch, batch.memory.shape), *others)
        parts = [teller.part(*each) for teller, each in zip(self._tellers, steps, strict=True)]
        counts, sizes = [len(each.batch.logit_places) for each in steps], {each.batch.num_tokens for each in steps}
        # The others cannot be called back from a step, so an interruption waits for its end.
        with uninterrupted():
            try:
                if self._exchanges_rows and len(sizes) > 1:
                    # Exchanged rows of different sizes would end every process, without a word of why.
                    raise PlanError(f"expected steps of one size on all replicas, got {sorted(sizes)} tokens")
                self._orders.give(StepOrder, parts, first_rows, is_captured)
                for teller in self._tellers:
                    teller.sent()
                self._launch_accounts(others)
                for tokens in [each.tokens for each in halves] or [_tokens_of(steps)]:
                    self._links.everyone.broadcast(tokens)
                yield _as_they_are if len(counts) == 1 else partial(self._links.across.gather, sizes=counts, dim=0)
            except Exception as error:
                cause = self._orders.break_off(error)
                raise RankLostError(f"a step of {batch.num_rows} rows that all ranks run broke off: {cause}") from error
            except BaseException as error:
                self._orders.break_off(error)
                raise


def _tokens_of(steps: Sequence[Beside]) -> Tensor:
    """The tokens of every replica, one after another."""
    tokens = [each.batch.tokens for each in steps]
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens)
