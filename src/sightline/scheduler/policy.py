"""Which rows the next step computes: a pure function from the state to a decision.

    1. pages   every running sequence needs pages for its tokens; where there are too few, those of the lowest rank
               give way: retracted, or held back until the step that they are in is over
    2. decode  rows with one pending token go first, so that none stalls
    3. turns   what the token budget leaves goes to prompts, under way or new, in turn: by priority, then by what
               their callers have had, then by arrival; who cannot be let in is not overtaken
    4. urgency where a new one cannot be let in, rows of a higher priority number give way to it

The first in rank can have every page there is, and no request needs more: somebody always goes on. (It gives way itself
only where it holds pages twice, its own and the cache's, and comes back sharing them.)

Knows numbers of pages and tokens. Changes nothing: the scheduler carries the decision out.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    waiting: Callable[[], Iterable[tuple[Turn, SequenceState]]]
    """In turn."""
    most_urgent: int | None
    """The lowest priority number of those that wait."""
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


class _Room:
    """What a step has left."""

    def __init__(self, num_tokens: int, num_scored: int) -> None:
        self.num_tokens = num_tokens
        self._num_scored = num_scored

    def allows(self, sequence: SequenceState) -> bool:
        return self.num_tokens > 0 and (self._num_scored > 0 or not sequence.scores_prompt)

    def take(self, sequence: SequenceState, num_pending: int) -> int:
        """As many of its pending tokens as there is room for, which is then taken."""
        count = min(num_pending, self.num_tokens)
        if sequence.scores_prompt:
            count = min(count, self._num_scored)
            self._num_scored -= count
        self.num_tokens -= count
        return count


def decide(state: State) -> Decision:
    """The next step. The same state gives the same decision."""
    return _Deciding(state).decide()


class _Deciding:
    """One decision as it comes about."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._tally = state.tally()
        self._room = _Room(state.max_step_tokens, state.max_scored_tokens)
        self._going = list(state.running)
        """Those that keep their pages, by rank."""
        self._sits_out: set[SequenceState] = set()
        """Running ones that this step does not compute."""
        self._retracted: list[SequenceState] = []
        self._growth: dict[SequenceState, int] = {}
        """Pages that running sequences are given."""
        self._num_growing = 0
        """In all."""
        self._admitted: list[Admission] = []
        self._num_new = 0
        """Pages that they are given."""
        self._rows: dict[SequenceState, int] = {}
        self._num_free_rows = state.num_free_rows
        self._is_full = False
        """Somebody could not be let in, whom nobody may overtake."""

    def decide(self) -> Decision:
        self._give_pages()
        decoding, prompts = [], []
        for sequence in self._going:
            if sequence in self._sits_out or not sequence.is_ready:
                continue
            if sequence.num_pending == 1:
                decoding.append(sequence)
            else:
                priority, arrival = sequence.rank
                prompts.append((Turn(priority, self._state.share(sequence.caller), arrival), sequence))
        self._add_decoding(decoding)
        prompts.sort(key=_turn)
        for _, sequence in heapq.merge(prompts, self._newcomers(), key=_turn):
            if self._room.num_tokens <= 0:
                break
            if sequence.table_row is None:
                self._is_full = not self._admit(sequence)
            elif sequence not in self._sits_out:
                self._add_row(sequence)
        return Decision(
            retracted=tuple(self._retracted),
            growth=tuple(self._growth.items()),
            admitted=tuple(self._admitted),
            num_pages=self._num_growing + self._num_new,
            rows=tuple(self._rows.items()),
        )

    def _give_pages(self) -> None:
        """Settles who grows and who gives way."""
        size = self._state.page_size
        missing = {
            sequence: lacking
            for sequence in self._going
            if (lacking := -(-sequence.num_expected // size) - sequence.num_pages) > 0 and sequence.is_ready
        }
        needed, num_coming = sum(missing.values()), 0
        while missing and not self._has_pages(needed - num_coming):
            victim = self._going[-1]
            if len(self._going) == 1 and not self._holds_copies(victim):
                break
            needed -= missing.pop(victim, 0)
            num_coming += self._give_way(victim)
        for sequence, lacking in missing.items():
            if self._has_pages(lacking):
                self._growth[sequence] = lacking
                self._num_growing += lacking
            else:
                self._sits_out.add(sequence)

    def _holds_copies(self, sequence: SequenceState) -> bool:
        """True where it keeps cached pages beside its own of the same tokens: let in again, it shares them."""
        without = self._tally.copy()
        without.retract(sequence)
        return without.num_pages - self._tally.num_pages > sequence.num_pages

    def _give_way(self, victim: SequenceState) -> int:
        """The last in rank is retracted; or held back, where a step with it is under way.

        Returns how many pages come when that step is over: they are there for the next decision.
        """
        self._going.pop()
        self._sits_out.add(victim)
        self._room.num_tokens += self._rows.pop(victim, 0)
        self._num_growing -= self._growth.pop(victim, 0)
        if victim.num_steps:
            return victim.num_pages
        self._retracted.append(victim)
        self._tally.retract(victim)
        self._num_free_rows += 1
        return 0

    def _newcomers(self) -> Iterator[tuple[Turn, SequenceState]]:
        """Those that wait, in turn, as long as somebody can be let in."""
        most_urgent = self._state.most_urgent
        if most_urgent is None or not (self._num_free_rows or self._gives_way_to(most_urgent)):
            return
        for turn, sequence in self._state.waiting():
            if self._is_full:
                return
            leader = sequence.leader
            if leader is None or leader.is_out or leader.num_generated > 0:
                yield turn, sequence

    def _admit(self, sequence: SequenceState) -> bool:
        """Lets a waiting sequence in if there is a row and pages for what it holds, or can be."""
        priority, _ = sequence.rank
        if not self._room.allows(sequence) or not (self._num_free_rows or self._gives_way_to(priority)):
            return False
        finding = self._state.find(sequence)
        needed = self._pages_for(len(sequence.tokens)) - finding.num_pages
        if not self._fits(needed, finding) and not self._make_way(priority, needed, finding):
            return False
        if finding.fork_of in self._retracted:
            return False
        self._num_new += needed
        self._num_free_rows -= 1
        self._admitted.append(Admission(sequence, finding))
        self._tally.share(finding.match)
        self._rows[sequence] = self._room.take(sequence, len(sequence.tokens) - finding.num_tokens)
        return True

    def _fits(self, needed: int, finding: Finding, num_coming: int = 0, rows_coming: int = 0) -> bool:
        """True where there is a row, and pages; a page more for each that runs.

        Who is let in only to be retracted at the next step has computed in vain.
        """
        beside = len(self._going) + len(self._admitted) + self._tally.cost(finding.match)
        return self._num_free_rows + rows_coming > 0 and self._has_pages(needed + beside - num_coming)

    def _make_way(self, priority: int, needed: int, finding: Finding) -> bool:
        """Makes those that are less urgent give way, the last in rank first.

        False where all of them would not be enough, and where some have to be waited for.
        """
        if not self._is_within_reach(priority, needed, finding):
            return False
        num_coming = rows_coming = 0
        while not self._fits(needed, finding, num_coming, rows_coming):
            if not self._gives_way_to(priority):
                return False
            victim = self._going[-1]
            num_coming += self._give_way(victim)
            rows_coming += victim.num_steps > 0
        return rows_coming == 0

    def _gives_way_to(self, priority: int) -> bool:
        """True where somebody runs who is less urgent."""
        return bool(self._going) and self._going[-1].rank[0] > priority

    def _is_within_reach(self, priority: int, needed: int, finding: Finding) -> bool:
        """True where there are pages once all that are less urgent have given way."""
        kept = [other for other in self._going if other.rank[0] <= priority]
        if len(kept) == len(self._going):
            return False
        tally = self._tally.copy()
        for other in self._going[len(kept) :]:
            tally.retract(other)
        left = tally.num_pages - tally.cost(finding.match) - self._num_new
        left += sum(map(self._num_unused, kept)) - sum(self._growth.get(other, 0) for other in kept)
        return needed + len(kept) + len(self._admitted) <= left

    def _add_decoding(self, sequences: Sequence[SequenceState]) -> None:
        """Rows of one token each. None scores a prompt: what its last token predicts is not in it."""
        taken = sequences[: self._room.num_tokens]
        self._rows.update(dict.fromkeys(taken, 1))
        self._room.num_tokens -= len(taken)

    def _add_row(self, sequence: SequenceState) -> None:
        if self._room.allows(sequence):
            self._rows[sequence] = self._room.take(sequence, sequence.num_pending)

    def _has_pages(self, count: int) -> bool:
        """True where so many are left, with what is reserved and unused."""
        left = self._tally.num_pages - self._num_new - self._num_growing
        return count <= left or count <= left + sum(map(self._num_unused, self._going))

    def _num_unused(self, sequence: SequenceState) -> int:
        """Pages that a sequence has and does not need yet."""
        return max(0, sequence.num_pages - self._pages_for(sequence.num_expected))

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._state.page_size)


def _turn(entry: tuple[Turn, SequenceState]) -> Turn:
    return entry[0]
