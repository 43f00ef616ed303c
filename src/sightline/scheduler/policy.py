"""The scheduling policy: a pure function from the state to the rows of the next step.

    1. pages   every running sequence needs pages for its tokens; if there are too few, those of the lowest rank
               are retracted, or held back until the step that they are in is over
    2. decode  rows with one pending token go first, so that none stalls
    3. turns   the rest of the token budget goes to prompts, running or new, in turn: by priority, then by their
               callers' usage, then by arrival; among new ones of a priority, callers without a row come first;
               a sequence that cannot be admitted is not overtaken
    4. urgency if a new sequence cannot be admitted, rows of a higher priority number give way to it
    5. rows    if the caller of a new sequence has no row, and no row or pages are free, the lowest-ranked row of the
               caller with the most rows gives way: only if it has at least two, and never a more urgent one

The first in rank can have every page there is, and no request needs more, so some sequence always makes progress. (It
gives way itself only if it holds pages twice, its own and the cache's, and shares them when it is admitted again.) Each
time the fifth rule takes a row, one more caller has one, so rows are not taken back and forth.

Knows numbers of pages and tokens. Changes nothing: the scheduler carries the decision out.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from sightline.scheduler.decision import Admission, Decision, Finding, State
from sightline.scheduler.queue import QueuePosition
from sightline.scheduler.sequence import SequenceState
from sightline.scheduler.victims import victims


class _Room:
    """Remaining token budget of a step."""

    def __init__(self, num_tokens: int, num_scored: int) -> None:
        self.num_tokens = num_tokens
        self._num_scored = num_scored

    def allows(self, sequence: SequenceState) -> bool:
        return self.num_tokens > 0 and self.allows_scoring(sequence)

    def allows_scoring(self, sequence: SequenceState) -> bool:
        return self._num_scored > 0 or not sequence.scores_prompt

    def take(self, sequence: SequenceState, num_pending: int) -> int:
        """Takes as many of the pending tokens as fit, and returns how many."""
        count = min(num_pending, self.num_tokens)
        if sequence.scores_prompt:
            count = min(count, self._num_scored)
            self._num_scored -= count
        self.num_tokens -= count
        return count


def decide(state: State) -> Decision:
    """Returns the next step. Deterministic."""
    return _Deciding(state).decide()


class _Deciding:
    """A decision in progress."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._tally = state.tally()
        self._room = _Room(state.max_step_tokens, state.max_scored_tokens)
        self._going = list(state.running)
        """Sequences that keep their pages, by rank."""
        self._held = dict(state.held)
        """Rows per caller, both kept and admitted."""
        self._sits_out: set[SequenceState] = set()
        """Running sequences that this step does not compute."""
        self._retracted: list[SequenceState] = []
        self._held_back: list[SequenceState] = []
        """Sequences that give way when a running step is over."""
        self._growth: dict[SequenceState, int] = {}
        """Pages given to each running sequence."""
        self._num_growing = 0
        """Total of `_growth`."""
        self._admitted: list[Admission] = []
        self._num_new = 0
        """Pages given to admitted sequences."""
        self._rows: dict[SequenceState, int] = {}
        self._num_free_rows = state.num_free_rows
        self._is_full = False
        """True if a sequence that must not be overtaken could not be admitted."""
        self._awaited: int | None = None
        """Priority of a sequence whose admission waits for rows that are freed at the end of a step."""

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
                prompts.append((QueuePosition(priority, self._state.share(sequence.caller), arrival), sequence))
        self._add_decoding(decoding)
        # If decode rows use the whole budget, a newcomer gets only the tokens that its victims would have had.
        is_crowded = self._room.num_tokens <= 0
        prompts.sort(key=_turn)
        for _, sequence in heapq.merge(prompts, self._newcomers(), key=_turn):
            if self._room.num_tokens <= 0 and not is_crowded:
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
        """Decides which sequences grow and which give way."""
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
        """True if it holds its own copies of pages that are also cached: admitted again, it would share them."""
        without = self._tally.copy()
        without.retract(sequence)
        return without.num_pages - self._tally.num_pages > sequence.num_pages

    def _give_way(self, victim: SequenceState) -> int:
        """Retracts a running sequence, or holds it back if it is in a running step.

        Returns the number of pages that are freed when that step is over, for the next decision.
        """
        if victim.num_steps:
            self._hold_back(victim)
            return victim.num_pages
        self._set_aside(victim)
        self._retracted.append(victim)
        self._tally.retract(victim)
        self._num_free_rows += 1
        return 0

    def _hold_back(self, victim: SequenceState) -> None:
        self._set_aside(victim)
        self._held_back.append(victim)

    def _set_aside(self, victim: SequenceState) -> None:
        """Cancels what this step was to give a running sequence."""
        self._going.remove(victim)
        self._hold(victim.caller, -1)
        self._sits_out.add(victim)
        self._room.num_tokens += self._rows.pop(victim, 0)
        self._num_growing -= self._growth.pop(victim, 0)

    def _hold(self, caller: str, change: int) -> None:
        """Adds `change` to the caller's row count."""
        count = self._held.pop(caller, 0) + change
        if count > 0:
            self._held[caller] = count

    def _newcomers(self) -> Iterator[tuple[QueuePosition, SequenceState]]:
        """Waiting sequences in turn, while one can be admitted."""
        if not self._can_let_in():
            return
        for turn, sequence in self._state.waiting(self._held):
            if self._is_full and not (turn.priority == self._awaited and self._is_deprived(sequence.caller)):
                return
            leader = sequence.leader
            if leader is None or leader.is_out or leader.num_generated > 0:
                yield turn, sequence

    def _can_let_in(self) -> bool:
        """True if there is a row for a waiting sequence, or one may give way, so that the queue is worth scanning."""
        most_urgent = self._state.most_urgent
        if most_urgent is None:
            return False
        if self._num_free_rows or (self._going and self._going[-1].rank[0] > most_urgent):
            return True
        if len(self._going) == len(self._held):
            return False
        deprived = self._state.most_urgent_beside(self._held)
        return deprived is not None and any(victims(self._going, self._held, deprived, is_deprived=True))

    def _is_deprived(self, caller: str) -> bool:
        """True if the caller has no row and none is on its way, to it or from it."""
        return caller not in self._held and all(caller != victim.caller for victim in self._held_back)

    def _admit(self, sequence: SequenceState) -> bool:
        """Admits a waiting sequence if a row and pages are available or can be freed."""
        if not self._room.allows_scoring(sequence):
            return False
        if self._is_full:
            self._hold_back_for(sequence)
            return False
        if not (self._num_free_rows and self._room.num_tokens > 0) and not any(self._victims(sequence)):
            return False
        finding = self._state.find(sequence)
        if finding.fork_of in self._retracted:
            return False
        needed = self._pages_for(len(sequence.tokens)) - finding.num_pages
        if not self._fits(needed, finding) and not self._make_way(sequence, needed, finding):
            return False
        self._num_new += needed
        self._num_free_rows -= 1
        self._hold(sequence.caller, 1)
        self._admitted.append(Admission(sequence, finding))
        self._tally.share(finding.match)
        self._rows[sequence] = self._room.take(sequence, len(sequence.tokens) - finding.num_tokens)
        return True

    def _fits(self, needed: int, finding: Finding) -> bool:
        """True if there is a row, a token, and pages, with one page to spare for each running sequence.

        The spare pages avoid admitting a sequence only to retract it at the next step.
        """
        beside = len(self._going) + len(self._admitted) + self._tally.cost(finding.match)
        return self._num_free_rows > 0 and self._room.num_tokens > 0 and self._has_pages(needed + beside)

    def _victims(self, newcomer: SequenceState) -> Iterator[SequenceState]:
        """Sequences that may give way to a waiting one, in order."""
        forked = {finding.fork_of for _, finding in self._admitted if finding.fork_of is not None}
        is_deprived = self._is_deprived(newcomer.caller)
        return victims(self._going, self._held, newcomer.rank[0], is_deprived=is_deprived, spared=forked)

    def _make_way(self, newcomer: SequenceState, needed: int, finding: Finding) -> bool:
        """Makes others give way. False if all of them would not be enough, or if some are in a running step: then all
        are held back, and none is retracted for nothing."""
        enough = self._enough(newcomer, needed, finding)
        if any(victim.num_steps for victim in enough):
            self._awaited = newcomer.rank[0]
            for victim in enough:
                self._hold_back(victim)
            self._hold(newcomer.caller, 1)
            return False
        for victim in enough:
            self._give_way(victim)
        return bool(enough)

    def _enough(self, newcomer: SequenceState, needed: int, finding: Finding) -> list[SequenceState]:
        """As many victims as a waiting sequence needs; none if all would not be enough."""
        tally, num_tokens, chosen = self._tally.copy(), self._room.num_tokens, []
        kept = sum(map(self._num_unused, self._going)) - self._num_new - self._num_growing
        num_beside = len(self._going) + len(self._admitted)
        for victim in self._victims(newcomer):
            chosen.append(victim)
            tally.retract(victim)
            num_tokens += self._rows.get(victim, 0)
            kept += self._growth.get(victim, 0) - self._num_unused(victim)
            left = tally.num_pages - tally.cost(finding.match) + kept
            if num_tokens > 0 and needed + num_beside - len(chosen) <= left:
                return chosen
        return []

    def _hold_back_for(self, newcomer: SequenceState) -> None:
        """Frees a row for the next decision, although nothing overtakes the awaited sequence."""
        victim = next(self._victims(newcomer), None)
        if victim is not None:
            self._hold_back(victim)
        self._hold(newcomer.caller, 1)

    def _add_decoding(self, sequences: Sequence[SequenceState]) -> None:
        """Adds rows of one token each. None of them scores a prompt: its last token predicts nothing within it."""
        taken = sequences[: self._room.num_tokens]
        self._rows.update(dict.fromkeys(taken, 1))
        self._room.num_tokens -= len(taken)

    def _add_row(self, sequence: SequenceState) -> None:
        if self._room.allows(sequence):
            self._rows[sequence] = self._room.take(sequence, sequence.num_pending)

    def _has_pages(self, count: int) -> bool:
        """True if `count` pages are left, including those reserved and unused."""
        left = self._tally.num_pages - self._num_new - self._num_growing
        return count <= left or count <= left + sum(map(self._num_unused, self._going))

    def _num_unused(self, sequence: SequenceState) -> int:
        """Pages that a sequence has and does not need yet."""
        return max(0, sequence.num_pages - self._pages_for(sequence.num_expected))

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._state.page_size)


def _turn(entry: tuple[QueuePosition, SequenceState]) -> QueuePosition:
    return entry[0]
