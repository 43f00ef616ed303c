"""What a decision follows from, and what it says.

Values only: `policy.decide` makes the one of the other, the scheduler gives the one and carries the other out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sightline.cache.prefix import PrefixMatch
from sightline.scheduler.queue import Turn
from sightline.scheduler.sequence import SequenceState


class Finding(NamedTuple):
    """What a waiting sequence can share."""

    match: PrefixMatch | None
    """In the prefix cache; None where there is no such cache."""
    fork_of: SequenceState | None
    """A running sequence that has more of its prompt."""
    num_tokens: int
    """That need not be computed."""
    num_pages: int
    """Whole pages of them, which others own too; the rest is copied."""


class Admission(NamedTuple):
    """A waiting sequence that is let in, and what it shares."""

    sequence: SequenceState
    finding: Finding


class Tally(Protocol):
    """Pages that are free or can be evicted, as a decision comes about."""

    num_pages: int

    def copy(self) -> Tally:
        """One on which something can be tried."""

    def cost(self, match: PrefixMatch | None) -> int:
        """Pages that can no longer be evicted once somebody shares what was found."""

    def share(self, match: PrefixMatch | None) -> None:
        """Somebody who is let in shares what was found."""

    def retract(self, sequence: SequenceState) -> None:
        """A running sequence gives its pages up."""


@dataclass(frozen=True)
class State:
    """Everything that a decision follows from."""

    running: Sequence[SequenceState]
    """By rank."""
    held: Mapping[str, int]
    """By caller: how many of them are its own. Who has none is not in it."""
    waiting: Callable[[Mapping[str, int]], Iterable[tuple[Turn, SequenceState]]]
    """In turn; of one priority, those first whose callers hold nothing."""
    most_urgent: int | None
    """The lowest priority number of those that wait."""
    most_urgent_beside: Callable[[Mapping[str, int]], int | None]
    """The same of those whose callers hold nothing."""
    share: Callable[[str], int]
    """What a caller has had."""
    find: Callable[[SequenceState], Finding]
    tally: Callable[[], Tally]
    """Of the pages that there are."""
    num_free_rows: int
    page_size: int
    max_step_tokens: int
    max_scored_tokens: int
    """Of a step's tokens, those that may all want logits."""


@dataclass(frozen=True)
class Decision:
    """What the next step computes, and what must happen before."""

    retracted: tuple[SequenceState, ...]
    growth: tuple[tuple[SequenceState, int], ...]
    """Running ones that need pages for their rows, and how many."""
    admitted: tuple[Admission, ...]
    num_pages: int
    """That must be free for those who grow and those who are let in."""
    rows: tuple[tuple[SequenceState, int], ...]
    """And how many of its pending tokens."""
