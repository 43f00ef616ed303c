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
from typing import NamedTuple

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

    @property
    def num_idle(self) -> int:
        """Of the pages, those that could have been evicted for others."""
        return 0 if self.match is None else self.match.num_idle


class Admission(NamedTuple):
    """A waiting sequence that is let in, and what it shares."""

    sequence: SequenceState
    finding: Finding


@dataclass(frozen=True)
class State:
    """Everything that a decision follows from."""

    running: Sequence[SequenceState]
    """By rank."""
    waiting: Iterable[tuple[Turn, SequenceState]]
    """In turn."""
    share: Callable[[str], int]
    """What a caller has had."""
    find: Callable[[SequenceState], Finding]
    gain: Callable[[Sequence[SequenceState]], int]
    """Pages that come free, or could be evicted, were these sequences all retracted."""
    num_free_pages: int
    num_evictable: int
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
        self._room = _Room(state.max_step_tokens, state.max_scored_tokens)
        self._going = list(state.running)
        """Those that keep their pages, by rank."""
        self._sits_out: set[SequenceState] = set()
        """Running ones that this step does not compute."""
        self._retracted: list[SequenceState] = []
        self._growth: dict[SequenceState, int] = {}
        """Pages that running sequences are given."""
        self._admitted: list[Admission] = []
        self._rows: dict[SequenceState, int] = {}
        self._num_pages = state.num_free_pages + state.num_evictable
        """That can be given out; what is reserved and unused is counted when it is wanted."""
        self._counts_unused = False
        self._num_gained = 0
        self._num_free_rows = state.num_free_rows
        self._is_full = False
        """Somebody could not be let in, whom nobody may overtake."""

    def decide(self) -> Decision:
        self._give_pages()
        ready = [sequence for sequence in self._going if sequence not in self._sits_out and sequence.is_ready]
        self._add_decoding([sequence for sequence in ready if sequence.num_pending == 1])
        prompts = [(self._turn(sequence), sequence) for sequence in ready if sequence.num_pending > 1]
        prompts.sort(key=_turn)
        for _, sequence in heapq.merge(prompts, self._newcomers(), key=_turn):
            if self._room.num_tokens <= 0:
                break
            if sequence.table_row is None:
                self._is_full = not self._admit(sequence)
            elif sequence not in self._sits_out:
                self._add_row(sequence)
        num_new = sum(self._pages_for(len(new.sequence.tokens)) - new.finding.num_pages for new in self._admitted)
        return Decision(
            retracted=tuple(self._retracted),
            growth=tuple(self._growth.items()),
            admitted=tuple(self._admitted),
            num_pages=sum(self._growth.values()) + num_new,
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
                self._num_pages -= lacking
                self._growth[sequence] = lacking
            else:
                self._sits_out.add(sequence)

    def _holds_copies(self, sequence: SequenceState) -> bool:
        """True where it keeps cached pages beside its own of the same tokens: let in again, it shares them."""
        return self._state.gain([*self._retracted, sequence]) - self._num_gained > sequence.num_pages

    def _give_way(self, victim: SequenceState) -> int:
        """The last in rank is retracted; or held back, where a step with it is under way.

        Returns how many pages come when that step is over: they are there for the next decision.
        """
        self._going.pop()
        self._sits_out.add(victim)
        self._room.num_tokens += self._rows.pop(victim, 0)
        self._num_pages += self._growth.pop(victim, 0)
        if victim.num_steps:
            return victim.num_pages
        self._retracted.append(victim)
        self._num_free_rows += 1
        gained = self._state.gain(self._retracted)
        self._num_pages += gained - self._num_gained - self._num_unused(victim)
        self._num_gained = gained
        return 0

    def _newcomers(self) -> Iterator[tuple[Turn, SequenceState]]:
        for turn, sequence in self._state.waiting:
            if self._is_full:
                return
            leader = sequence.leader
            if leader is None or leader.is_out or leader.num_generated > 0:
                yield turn, sequence

    def _admit(self, sequence: SequenceState) -> bool:
        """Lets a waiting sequence in if there is a row and pages for what it holds, or can be."""
        if not self._room.allows(sequence):
            return False
        finding, needed = None, 0
        while True:
            if self._num_free_rows > 0:
                if finding is None:
                    finding = self._state.find(sequence)
                    needed = self._pages_for(len(sequence.tokens)) - finding.num_pages + finding.num_idle
                if finding.fork_of in self._retracted:
                    return False
                # A page more for each that runs: who is let in only to be retracted next has computed in vain.
                if self._has_pages(needed + len(self._going) + len(self._admitted)):
                    break
            if not self._make_way(sequence, needed):
                return False
        self._num_pages -= needed
        self._num_free_rows -= 1
        self._admitted.append(Admission(sequence, finding))
        self._rows[sequence] = self._room.take(sequence, len(sequence.tokens) - finding.num_tokens)
        return True

    def _make_way(self, sequence: SequenceState, num_needed: int) -> bool:
        """Makes the last in rank give way to a more urgent one; False where that would not help, or not yet."""
        priority, _ = sequence.rank
        less_urgent = [other for other in self._going if other.rank[0] > priority]
        most = self._num_pages + sum(other.num_pages for other in less_urgent)
        if not less_urgent or most < num_needed:
            return False
        victim = less_urgent[-1]
        self._give_way(victim)
        return victim.num_steps == 0

    def _turn(self, sequence: SequenceState) -> Turn:
        priority, arrival = sequence.rank
        return Turn(priority, self._state.share(sequence.caller), arrival)

    def _add_decoding(self, sequences: Sequence[SequenceState]) -> None:
        """Rows of one token each. None scores a prompt: what its last token predicts is not in it."""
        taken = sequences[: self._room.num_tokens]
        self._rows.update(dict.fromkeys(taken, 1))
        self._room.num_tokens -= len(taken)

    def _add_row(self, sequence: SequenceState) -> None:
        if self._room.allows(sequence):
            self._rows[sequence] = self._room.take(sequence, sequence.num_pending)

    def _has_pages(self, count: int) -> bool:
        if count > self._num_pages and not self._counts_unused:
            self._counts_unused = True
            self._num_pages += sum(map(self._num_unused, self._going))
        return count <= self._num_pages

    def _num_unused(self, sequence: SequenceState) -> int:
        """Pages that a sequence has and does not need yet."""
        return max(0, sequence.num_pages - self._pages_for(sequence.num_expected))

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._state.page_size)


def _turn(entry: tuple[Turn, SequenceState]) -> Turn:
    return entry[0]
