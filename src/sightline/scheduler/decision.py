"""The inputs and the result of a scheduling decision.

Values only: `policy.decide` turns a `State` into a `Decision`, and the scheduler carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sightline.cache.prefix import PrefixMatch
from sightline.scheduler.queue import QueuePosition
from sightline.scheduler.sequence import SequenceState


class Finding(NamedTuple):
    """What a waiting sequence can share."""

    match: PrefixMatch | None
    """Match in the prefix cache; None if prefix caching is off."""
    fork_of: SequenceState | None
    """A running sequence that has computed more of the same prompt."""
    num_tokens: int
    """Tokens that need not be computed."""
    num_pages: int
    """Whole pages of these tokens, which are shared; the rest is copied."""


class Admission(NamedTuple):
    """A waiting sequence that is admitted, and what it shares."""

    sequence: SequenceState
    finding: Finding


class Tally(Protocol):
    """Counts pages that are free or evictable, while a decision is made."""

    num_pages: int

    def copy(self) -> Tally:
        """A copy for trying something out."""

    def cost(self, match: PrefixMatch | None) -> int:
        """Pages that are no longer evictable once the match is shared."""

    def share(self, match: PrefixMatch | None) -> None:
        """Counts an admitted sequence that shares the match."""

    def retract(self, sequence: SequenceState) -> None:
        """Counts the pages of a running sequence as given up."""


@dataclass(frozen=True)
class State:
    """All inputs of a decision."""

    running: Sequence[SequenceState]
    """By rank."""
    held: Mapping[str, int]
    """Running rows per caller. Callers without any are absent."""
    waiting: Callable[[Mapping[str, int]], Iterable[tuple[QueuePosition, SequenceState]]]
    """Waiting sequences in turn; within a priority, callers without a running row come first."""
    most_urgent: int | None
    """The lowest priority number among the waiting sequences."""
    most_urgent_beside: Callable[[Mapping[str, int]], int | None]
    """The same among callers without a running row."""
    share: Callable[[str], int]
    """Tokens that a caller has used."""
    find: Callable[[SequenceState], Finding]
    tally: Callable[[], Tally]
    """Tally of the current pages."""
    num_free_rows: int
    page_size: int
    max_step_tokens: int
    max_scored_tokens: int
    """Maximum tokens of a step that may all need logits."""


@dataclass(frozen=True)
class Decision:
    """What the next step computes, and what must happen before it."""

    retracted: tuple[SequenceState, ...]
    growth: tuple[tuple[SequenceState, int], ...]
    """Running sequences that need pages for their rows, and how many."""
    admitted: tuple[Admission, ...]
    num_pages: int
    """Pages that must be free for growing and admitted sequences."""
    rows: tuple[tuple[SequenceState, int], ...]
    """Each sequence, and how many of its pending tokens are computed."""
