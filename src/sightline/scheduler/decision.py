"""The inputs and the result of a scheduling decision: values only.

`policy.decide` turns a `SchedulerState` into a `Decision`, or into an `Inquiry` about facts that the state does not
list yet: looking up prefixes and counting the owners of pages is too expensive to do for every sequence at every step.
The scheduler then decides again with a state that lists them. Sequences are named by their arrival, which is unique.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sightline.scheduler.costs import StepLimit
from sightline.scheduler.tally import Holding, Tally


class RunningSequence(NamedTuple):
    """A sequence that has a row."""

    priority: int
    arrival: int
    caller: str
    num_pending: int
    """Tokens that can be computed next: none while they depend on a result in flight."""
    num_pages: int
    num_lacking: int
    """Pages that it needs beyond those that it has; negative if some are reserved and unused."""
    num_steps: int
    """Launched steps that contain it, and keep its pages until they are over."""
    scores_prompt: bool
    """True if all its pending tokens need logits."""
    context_len: int
    """Tokens before its pending ones."""

    @property
    def num_unused(self) -> int:
        """Pages that it has and does not need yet."""
        return max(0, -self.num_lacking)


class WaitingSequence(NamedTuple):
    """A sequence in the queue."""

    priority: int
    arrival: int
    caller: str
    num_tokens: int
    was_admitted: bool
    """True if it has run before, so that its prompt is not charged again."""
    scores_prompt: bool
    leader: int | None
    """The request's first continuation; None for that one itself."""


class WaitingLines(NamedTuple):
    """The sequences that a decision can consider."""

    levels: Mapping[int, Mapping[str, tuple[WaitingSequence, ...]]]
    """By priority and caller, each line by arrival. At least as many of each as there are rows."""
    shares: Mapping[str, int]
    """Tokens that each of their callers has used."""
    busy_leaders: frozenset[int]
    """Leaders that compute their prompt: those that follow them wait for it."""


class Finding(NamedTuple):
    """What a waiting sequence can share."""

    num_tokens: int
    """Tokens that need not be computed."""
    num_pages: int
    """Whole pages of these tokens, which are shared; the rest is copied, or comes from a tier below."""
    fork_of: int | None
    """A running sequence that has computed more of the same prompt."""
    path: tuple[int, ...]
    """Pages of the match in the prefix cache, in order."""


@dataclass(frozen=True)
class SchedulerState:
    """All inputs of a decision."""

    running: tuple[RunningSequence, ...]
    """By rank: priority, then arrival."""
    held: Mapping[str, int]
    """Running rows per caller. Callers without any are absent."""
    shares: Mapping[str, int]
    """Tokens that each caller in `held` has used."""
    urgencies: Mapping[str, int]
    """The lowest priority number per waiting caller."""
    tally: Tally
    num_free_rows: int
    page_size: int
    max_step_tokens: int
    max_scored_tokens: int
    """Maximum tokens of a step that may all need logits."""
    waiting: WaitingLines | None
    """None if not listed yet."""
    findings: Mapping[int, Finding]
    """What the first waiting sequences in turn can share, as far as it is known."""
    holdings: Mapping[int, Holding]
    """Pages of the running sequences that may give way, as far as they are known."""
    limit: StepLimit | None = None
    """What a step may cost while rows generate; None is no limit."""
    generates_beside: bool = False
    """True if rows of another replica, which steps at the same time, wait for their next token."""
    num_coming: int = 0
    """Pages that come free without anybody giving way: a tier below is about to have what they hold."""


class Inquiry(NamedTuple):
    """Facts without which nothing can be decided."""

    waiting: bool = False
    findings: tuple[int, ...] = ()
    holdings: tuple[int, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What the next step computes, and what must happen before it."""

    retracted: tuple[int, ...]
    growth: Mapping[int, int]
    """Running sequences that need pages for their rows, and how many."""
    admitted: tuple[int, ...]
    num_pages: int
    """Pages that must be free for growing and admitted sequences."""
    rows: Mapping[int, int]
    """The sequences of the step in order, and how many of its pending tokens are computed."""
