"""Other ranks of a simulated engine: real followers in the same thread, which run each step behind the leading rank.

    leader   plan ─▶ order ─▶ tokens ─▶ forward ─┬─▶ the first rank of each other replica runs the step, for its logits
                       │                         ├─▶ each other follower does, and logits of a replica are compared
                       └─ lost here, or stalls ──┴─▶ `RankLostError`

Each follower has a store of its own, in which entries that were never written are NaN. So a page, a copy or a state
that it was not told of gives it other logits than the leader's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from sightline.cache.store import CacheStore
from sightline.core.batch import Batch
from sightline.core.errors import RankLostError
from sightline.distributed.channels import OrderReceiver, OrderSender
from sightline.distributed.collectives import Collectives, Links
from sightline.distributed.ranks import Place, Rank
from sightline.runner.following import Follower
from sightline.runner.replicas import Beside
from sightline.runner.roles import Companions, Join, Leads
from sightline.testing.simulator.faults import DEVICE_GONE, Faults
from sightline.testing.simulator.scenario import RankLoss

STALL_SECONDS = 20.0


class SimulatedCollectives(Collectives):
    """Those of a model that is not divided: every rank has all of it."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def sum(self, x: Tensor) -> None:
        raise AssertionError(f"the simulated model is not divided, and sums {len(x)} rows")

    def gather(self, part: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        raise AssertionError(f"the simulated model is not divided, and gathers {part.shape} in {dim} to {sizes}")

    def stack(self, part: Tensor, out: Tensor) -> None:
        raise AssertionError(f"the simulated model is not divided, and exchanges {part.shape} for {out.shape}")

    def sum_of_part(self, parts: Tensor, out: Tensor) -> None:
        raise AssertionError(f"the simulated model is not divided, and sums {parts.shape} to {out.shape}")

    def broadcast(self, x: Tensor) -> None:
        raise AssertionError(f"the leading rank sends tokens to all ranks, and not {len(x)} to some")

    def least(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def limit(self, seconds: float) -> None:
        """Nothing takes time."""

    def close(self) -> None:
        """Nothing is open."""


class LeadersCollectives(SimulatedCollectives):
    """Keeps tokens for the followers, who ask for them once the leader has run the step."""

    def __init__(self, rank: Rank, tokens: Sequence[deque[Tensor]], faults: Faults) -> None:
        super().__init__(rank)
        self._tokens = tuple(tokens)
        self._faults = faults

    def broadcast(self, x: Tensor) -> None:
        lose_rank(self._faults, RankLoss.DIES_IN_A_STEP, RankLoss.STALLS)
        for each in self._tokens:
            each.append(x.clone())


class FollowersCollectives(SimulatedCollectives):
    """Gives a follower the tokens that the leader had."""

    def __init__(self, rank: Rank, tokens: deque[Tensor]) -> None:
        super().__init__(rank)
        self._tokens = tokens

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self._tokens.popleft())


class LeadersOutputs(SimulatedCollectives):
    """Lets the first rank of each other replica run the step, and takes its outputs."""

    def __init__(self, rank: Rank, crew: Sequence[Crewmate]) -> None:
        """`crew` are the first ranks of the other replicas."""
        super().__init__(rank)
        self._crew = tuple(crew)

    def gather(self, part: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        parts = [part, *(each.run_orders() for each in self._crew)]
        found = [each.shape[dim] for each in parts]
        if found != list(sizes):
            raise AssertionError(f"expected {sizes} outputs of the replicas, got {found}")
        return torch.cat(parts, dim=dim)


class FollowersOutputs(SimulatedCollectives):
    """Keeps what the first rank of a replica gives."""

    def __init__(self, rank: Rank, given: deque[Tensor]) -> None:
        super().__init__(rank)
        self._given = given

    def gather(self, part: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        if part.shape[dim] != sizes[self.rank.index]:
            raise AssertionError(f"expected {sizes[self.rank.index]} outputs, got {part.shape[dim]}")
        self._given.append(part)
        return part


class Mailbox(OrderReceiver):
    """The orders that a follower has not carried out."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()

    def receive(self) -> bytes:
        return self.messages.popleft()


class MailSender(OrderSender):
    """Puts every order into the mailboxes."""

    def __init__(self, mailboxes: Sequence[Mailbox], faults: Faults) -> None:
        self._mailboxes = tuple(mailboxes)
        self._faults = faults

    def send(self, message: bytes) -> None:
        lose_rank(self._faults, RankLoss.DIES)
        for each in self._mailboxes:
            each.messages.append(message)

    def why_lost(self) -> str:
        return ""

    def wait_until_ready(self) -> None:
        """They always are."""

    def begin_serving(self) -> None:
        """Nothing takes time."""

    def close(self) -> None:
        """There are no processes."""


class Crewmate(NamedTuple):
    """One follower."""

    place: Place
    follower: Follower
    store: CacheStore
    """Its cache, with the entries that it wrote."""
    mailbox: Mailbox
    tokens: deque[Tensor]
    given: deque[Tensor]
    """The outputs that it gave the leading rank."""
    logits: list[Tensor]
    """Those of the steps that it ran, and that were not compared yet."""

    def run_orders(self) -> Tensor:
        """Carries out the orders that it got, of which the last is a step. Returns what it gave."""
        while self.mailbox.messages:
            self.follower.follow()
        return self.given.popleft()


class SimulatedLeads(Leads):
    """The leading rank of a simulated engine."""

    def __init__(
        self,
        links: Links,
        sender: OrderSender,
        crew: Sequence[Crewmate],
        logits: list[Tensor],
        tell: Callable[[str], None],
    ) -> None:
        """`crew` are the followers, `logits` those of the leader's last step; `tell` hears of differences."""
        super().__init__(links, sender)
        self._crew = crew
        self._logits = logits
        self._tell = tell

    def companions(self, stores: Sequence[CacheStore], *, exchanges_rows: bool) -> Companions:
        led = super().companions(stores, exchanges_rows=exchanges_rows)
        return _Compared(led, self._crew, self._logits, self._tell)


class _Compared(Companions):
    """Lets the followers run each step behind the leader, and compares what the ranks of a replica read."""

    def __init__(
        self, led: Companions, crew: Sequence[Crewmate], logits: list[Tensor], tell: Callable[[str], None]
    ) -> None:
        self._led = led
        self._crew = tuple(crew)
        self._logits = logits
        self._tell = tell

    @contextmanager
    def along(
        self, batch: Batch, beside: Sequence[Beside] = (), *, halves: Sequence[Batch] = (), is_captured: bool = False
    ) -> Iterator[Join]:
        self._logits.clear()
        try:
            with self._led.along(batch, beside, halves=halves, is_captured=is_captured) as join:
                yield join
            self._compare()
        except RankLostError as error:
            if DEVICE_GONE not in str(error):
                self._tell(f"a rank raised {error.__cause__!r}")
            raise

    def _compare(self) -> None:
        read = {0: list(self._logits)}
        for each in self._crew:
            try:
                while each.mailbox.messages:
                    each.follower.follow()
            except Exception as error:
                self._tell(f"{each.place.rank} raised {type(error).__name__}: {error}")
                return
            of_first = read.setdefault(each.place.replica.index, list(each.logits))
            if not _are_equal(each.logits, of_first):
                self._tell(f"{each.place.rank} read other entries than the first rank of its replica")
            each.logits.clear()
            each.given.clear()


def lose_rank(faults: Faults, *ways: RankLoss) -> None:
    """Raises if a rank is to be lost in one of these ways."""
    if faults.rank_loss is None or faults.rank_loss not in ways:
        return
    if faults.rank_loss is RankLoss.STALLS:
        faults.clock.now += STALL_SECONDS
    faults.device_was_lost = True
    raise RankLostError(f"{DEVICE_GONE}: rank 1 {faults.rank_loss.value}")


def _are_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """True if both are the same numbers, NaN included."""
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(torch.allclose(*each, rtol=0.0, atol=0.0, equal_nan=True) for each in pairs)
