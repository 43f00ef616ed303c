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
    supply: Callable[[Sequence[SequenceState], Sequence[Admission]], int]
    """Pages that are free or can be evicted once these are retracted and those share what they found."""
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
            num_pages=sum(self._growth.values()) + self._num_new,
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
            else:
                self._sits_out.add(sequence)

    def _holds_copies(self, sequence: SequenceState) -> bool:
        """True where it keeps cached pages beside its own of the same tokens: let in again, it shares them."""
        without = self._state.supply([*self._retracted, sequence], self._admitted)
        return without - self._state.supply(self._retracted, self._admitted) > sequence.num_pages

    def _give_way(self, victim: SequenceState) -> int:
        """The last in rank is retracted; or held back, where a step with it is under way.

        Returns how many pages come when that step is over: they are there for the next decision.
        """
        self._going.pop()
        self._sits_out.add(victim)
        self._room.num_tokens += self._rows.pop(victim, 0)
        self._growth.pop(victim, None)
        if victim.num_steps:
            return victim.num_pages
        self._retracted.append(victim)
        self._num_free_rows += 1
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
        if not self._num_free_rows and not self._is_less_urgent(sequence):
            return False
        new = Admission(sequence, self._state.find(sequence))
        needed = self._pages_for(len(sequence.tokens)) - new.finding.num_pages
        num_rows, num_coming = 0, 0
        # A page more for each that runs: who is let in only to be retracted next has computed in vain.
        while self._num_free_rows + num_rows < 1 or not self._has_pages(
            needed + len(self._going) + len(self._admitted) - num_coming, new
        ):
            if not self._is_less_urgent(sequence) or not self._is_within_reach(needed - num_coming, new):
                return False
            victim = self._going[-1]
            num_coming += self._give_way(victim)
            num_rows += victim.num_steps > 0
        if num_rows or new.finding.fork_of in self._retracted:
            return False
        self._num_new += needed
        self._num_free_rows -= 1
        self._admitted.append(new)
        self._rows[sequence] = self._room.take(sequence, len(sequence.tokens) - new.finding.num_tokens)
        return True

    def _is_less_urgent(self, sequence: SequenceState) -> bool:
        """True where somebody runs who gives way to a waiting sequence."""
        return bool(self._going) and self._going[-1].rank[0] > sequence.rank[0]

    def _is_within_reach(self, needed: int, new: Admission) -> bool:
        """True where there are pages for a waiting sequence once all that are less urgent have given way."""
        less_urgent = [other for other in self._going if other.rank[0] > new.sequence.rank[0]]
        kept = [other for other in self._going if other.rank[0] <= new.sequence.rank[0]]
        free = self._state.supply([*self._retracted, *less_urgent], [*self._admitted, new])
        free += sum(map(self._num_unused, kept)) - self._num_new - sum(self._growth.get(other, 0) for other in kept)
        return needed + len(kept) + len(self._admitted) <= free

    def _add_decoding(self, sequences: Sequence[SequenceState]) -> None:
        """Rows of one token each. None scores a prompt: what its last token predicts is not in it."""
        taken = sequences[: self._room.num_tokens]
        self._rows.update(dict.fromkeys(taken, 1))
        self._room.num_tokens -= len(taken)

    def _add_row(self, sequence: SequenceState) -> None:
        if self._room.allows(sequence):
            self._rows[sequence] = self._room.take(sequence, sequence.num_pending)

    def _has_pages(self, count: int, *more: Admission) -> bool:
        """True where so many are left, what is reserved and unused included, once `more` share what they found."""
        left = self._state.supply(self._retracted, [*self._admitted, *more])
        left -= self._num_new + sum(self._growth.values())
        return count <= left or count <= left + sum(map(self._num_unused, self._going))

    def _num_unused(self, sequence: SequenceState) -> int:
        """Pages that a sequence has and does not need yet."""
        return max(0, sequence.num_pages - self._pages_for(sequence.num_expected))

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._state.page_size)


def _turn(entry: tuple[Turn, SequenceState]) -> Turn:
    return entry[0]
