"""Other ranks of a simulated engine: real followers in the same thread, which run each step behind the leading rank.

    leader   plan ─▶ order ─▶ tokens ─▶ forward ─┬─▶ each follower carries out its orders, and logits are compared
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
from sightline.distributed.collectives import Collectives
from sightline.distributed.ranks import Rank
from sightline.runner.following import Follower
from sightline.runner.roles import Companions, Leads
from sightline.testing.simulator.faults import DEVICE_GONE, Faults
from sightline.testing.simulator.scenario import RankLoss

STALL_SECONDS = 20.0


class SimulatedCollectives(Collectives):
    """Those of a model that is not divided: every rank has all of it."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def sum(self, x: Tensor) -> None:
        raise AssertionError(f"the simulated model is not divided, and sums {len(x)} rows")

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        raise AssertionError(f"the simulated model is not divided, and gathers {len(part)} rows of {widths}")

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

    number: int
    follower: Follower
    mailbox: Mailbox
    tokens: deque[Tensor]
    logits: list[Tensor]
    """Those of the steps that it ran, and that were not compared yet."""


class SimulatedLeads(Leads):
    """The leading rank of a simulated engine."""

    def __init__(
        self,
        collectives: Collectives,
        sender: OrderSender,
        crew: Sequence[Crewmate],
        logits: list[Tensor],
        tell: Callable[[str], None],
    ) -> None:
        """`crew` are the followers, `logits` those of the leader's last step; `tell` hears of differences."""
        super().__init__(collectives, sender)
        self._crew = crew
        self._logits = logits
        self._tell = tell

    def companions(self, store: CacheStore) -> Companions:
        return _Compared(super().companions(store), self._crew, self._logits, self._tell)


class _Compared(Companions):
    """Lets the followers run each step behind the leader, and compares what they read."""

    def __init__(
        self, led: Companions, crew: Sequence[Crewmate], logits: list[Tensor], tell: Callable[[str], None]
    ) -> None:
        self._led = led
        self._crew = tuple(crew)
        self._logits = logits
        self._tell = tell

    @contextmanager
    def along(self, batch: Batch, halves: Sequence[Batch] = (), *, is_captured: bool = False) -> Iterator[None]:
        self._logits.clear()
        with self._led.along(batch, halves, is_captured=is_captured):
            yield
        for each in self._crew:
            try:
                while each.mailbox.messages:
                    each.follower.follow()
            except Exception as error:
                self._tell(f"rank {each.number} raised {type(error).__name__}: {error}")
                return
            if not _are_equal(each.logits, self._logits):
                self._tell(f"rank {each.number} read other entries than the leading rank")
            each.logits.clear()


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
