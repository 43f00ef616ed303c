"""Guesses with networks that continue from the states of the model: EAGLE-3 heads, and multi-token prediction.

    place i of depth d   takes the state of depth d - 1 at i, the model's own for the first, and token i + d
                         gives a state, and guesses token i + d + 1

    the model has computed t0 to t3, and chosen t4
    depth 1   t1 t2 t3 t4 ──▶ d1
    depth 2   t2 t3 t4 d1 ──▶ d2
    further   the last depth, at place 4, from its own state at 3 and d2 ──▶ d3

Every depth is a network with a cache of its own. It computes along with the model, also prompts, so that its entries
are shared with the model's. Entries made from guesses are made again once the tokens are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sightline.core import speculation
from sightline.core.batch import RowWork
from sightline.core.speculation import Speculation
from sightline.models.drafting import DraftSource
from sightline.models.eagle3 import Eagle3Draft
from sightline.models.loading.opening import open_checkpoint
from sightline.models.mtp import define_mtp
from sightline.models.registry import define_eagle3
from sightline.runner.networks import DraftRuntime
from sightline.runner.sampling.sampler import RowSampling
from sightline.scheduler.sequence import Draft, DraftRoom, SequenceState
from sightline.speculative.drafter import (
    Drafter,
    DrafterContext,
    DrafterKind,
    DraftTarget,
    ObservedRow,
    ObservedStep,
)
from sightline.speculative.network_steps import (
    DraftedRow,
    NetworkSteps,
    choosing,
    drafts_in_order,
    drawn_at,
    longest_first,
)


class _Ahead(NamedTuple):
    """The guesses for a sequence so far, and the state that the next one begins with."""

    tokens: tuple[Tensor, ...]
    """[1] int64 each, on the device: one guess of each depth."""
    state: Tensor
    """[1, width]: the last depth's state at the last place."""
    place: int
    """The place of the next entry of the last depth."""


class _Span(NamedTuple):
    """States of successive places."""

    first: int
    states: Tensor

    @property
    def stop(self) -> int:
        return self.first + self.states.shape[0]

    def part(self, first: int, stop: int) -> Tensor:
        return self.states[first - self.first : stop - self.first]


@dataclass(eq=False)
class _Row:
    """A row that is being observed."""

    sequence: SequenceState
    table_row: int
    first: int
    """The place of the first token in `tokens`."""
    tokens: list[int]
    """Known ones, then guesses."""
    num_known: int
    """How many tokens of the sequence are known, those before `first` included."""
    stop: int
    """Places that the model has computed."""
    is_guessed_for: bool
    """True if the model has chosen its next token."""
    given: _Span
    """States of the depth before."""
    guesses: list[Tensor] = field(default_factory=list)

    def num_right(self, depth: int) -> int:
        """Entries of a depth that known tokens give."""
        return min(self.stop, self.num_known - depth)

    def drawn(self, depth: int) -> RowSampling | None:
        """How the token that a depth guesses is drawn."""
        return drawn_at(self.sequence, self.num_known - len(self.sequence.request.prompt_token_ids) + depth - 1)

    def work(self, depth: int, length: int) -> RowWork | None:
        """The entries of a depth behind the first `length`; None if none can be computed: a token or a state is not
        there."""
        stop = min(self.given.stop, self.first + len(self.tokens) - depth)
        if stop <= length or length < self.given.first:
            return None
        tokens = self.tokens[length + depth - self.first : stop + depth - self.first]
        return RowWork(self.table_row, tokens, length, num_logits=int(self.is_guessed_for))


class HeadDrafter(Drafter):
    """Guesses the likeliest tokens of one or several networks, each of which continues the states of the one before."""

    def __init__(self, draft: DraftRuntime) -> None:
        self._draft = draft
        self._depths = tuple(NetworkSteps(each) for each in draft.networks)
        self._ahead: dict[SequenceState, _Ahead] = {}
        self._held: dict[SequenceState, dict[int, _Span]] = {}
        """By depth: its states at places that the next depth has not computed with known tokens."""

    @staticmethod
    def make(context: DrafterContext) -> HeadDrafter:
        return HeadDrafter(context.networks)

    def propose(self, rooms: Sequence[DraftRoom]) -> Sequence[Draft]:
        guessed = [index for index, each in enumerate(rooms) if each.sequence in self._ahead]
        if not guessed:
            return [Draft()] * len(rooms)
        order = longest_first(rooms, guessed)
        sequences = [rooms[index].sequence for index in order]
        most = [rooms[index].most for index in order]
        rows = [each.held_row for each in sequences]
        ahead = [self._ahead[each] for each in sequences]
        columns = [
            torch.cat([each.tokens[depth] for each, many in zip(ahead, most, strict=True) if many > depth])
            for depth in range(min(len(self._depths), most[0]))
        ]
        last, num_depths = self._depths[-1], len(self._depths)
        for row, each in zip(rows, ahead, strict=True):
            last.discard(row, each.place)
        drafted = [
            DraftedRow(row, each.place, many - num_depths)
            for row, each, many in zip(rows, ahead, most, strict=True)
            if many > num_depths
        ]
        states = torch.cat([each.state for each in ahead[: len(drafted)] or ahead[:1]])
        columns += last.roll_out(drafted, columns[-1], states, choosing(self._draft, sequences, num_depths))
        return drafts_in_order(columns, order, len(rooms))

    def observe(self, step: ObservedStep) -> None:
        states = self._draft.fuse(step.given_states)
        rows = [self._observed(each, states) for each in step.rows if self._follows(each)]
        for depth, steps in enumerate(self._depths, 1):
            rows = self._compute(depth, steps, rows)

    def _follows(self, each: ObservedRow) -> bool:
        """True if the first depth has all entries before the row's. If it has not, it cannot guess: the states that
        it would need are gone."""
        self._ahead.pop(each.row.sequence, None)
        for steps in self._depths:
            steps.discard(each.row.table_row)
        return self._depths[0].length(each.row.table_row) == each.row.context_len

    def _observed(self, each: ObservedRow, states: Tensor) -> _Row:
        row, result = each.row, each.result
        first = min(steps.length(row.table_row) for steps in self._depths)
        tokens = each.known_from(first)
        return _Row(
            sequence=row.sequence,
            table_row=row.table_row,
            first=first,
            tokens=tokens,
            num_known=first + len(tokens),
            stop=result.seq_len,
            is_guessed_for=bool(result.tokens),
            given=_Span(row.context_len, each.kept(states)),
        )

    def _compute(self, depth: int, steps: NetworkSteps, rows: Sequence[_Row]) -> list[_Row]:
        """Computes the entries of a depth, takes its guesses, and leaves its states for the next depth.

        Returns the rows that have some.
        """
        planned = [(row, work) for row in rows if (work := row.work(depth, steps.length(row.table_row))) is not None]
        if not planned:
            return []
        given = [row.given.part(work.context_len, work.context_len + len(work.tokens)) for row, work in planned]
        outputs = steps.run([work for _, work in planned], None, torch.cat(given))
        made = torch.split(outputs.given_states, [len(work.tokens) for _, work in planned])
        is_last = depth == len(self._depths)
        # Copied, because a sequence keeps its last state, and a view would keep those of the whole step.
        ends = torch.cat([each[-1:] for each in made]) if is_last else outputs.given_states
        guesses = self._draft.choose(outputs.logits, [row.drawn(depth) for row, _ in planned if row.is_guessed_for])
        read = [] if is_last else guesses.tolist()
        place = 0
        for index, ((row, work), states) in enumerate(zip(planned, made, strict=True)):
            steps.commit(row.table_row, max(work.context_len, row.num_right(depth)))
            row.given = _Span(work.context_len, states)
            if row.is_guessed_for:
                row.guesses.append(guesses[place : place + 1])
                row.tokens += read[place : place + 1]
                place += 1
            if not is_last:
                self._hold(depth, row)
            elif row.is_guessed_for:
                self._ahead[row.sequence] = _Ahead(tuple(row.guesses), ends[index : index + 1], row.given.stop)
        return [row for row, _ in planned]

    def _hold(self, depth: int, row: _Row) -> None:
        """Puts the states that were kept of a depth before the new ones, and keeps those that the next depth cannot
        use for good yet."""
        held = self._held.setdefault(row.sequence, {})
        kept = held.get(depth)
        first = self._depths[depth].length(row.table_row)
        if kept is not None and first < row.given.first == kept.stop:
            row.given = _Span(kept.first, torch.cat([kept.states, row.given.states]))
        stop = row.num_right(depth)
        first = min(max(row.given.first, row.num_right(depth + 1)), stop)
        held[depth] = _Span(first, row.given.part(first, stop).clone())

    def forget(self, sequence: SequenceState) -> None:
        self._ahead.pop(sequence, None)
        self._held.pop(sequence, None)


def _eagle3(config: Speculation, target: DraftTarget) -> DraftSource:
    checkpoint = open_checkpoint(config.network, target.ledger)
    head = define_eagle3(checkpoint.config, target.definition, target.ledger)
    return DraftSource(Eagle3Draft(head), checkpoint)


def _mtp(config: Speculation, target: DraftTarget) -> DraftSource:
    """The modules of the model, at most one for each guessed token. The last one guesses any further tokens."""
    count = min(max(1, len(target.definition.predictors)), config.num_speculative_tokens)
    return DraftSource(define_mtp(target.definition, target.checkpoint, count), target.checkpoint)


EAGLE3 = DrafterKind(speculation.EAGLE3, HeadDrafter.make, networks=_eagle3)
MTP = DrafterKind(speculation.MTP, HeadDrafter.make, networks=_mtp)
