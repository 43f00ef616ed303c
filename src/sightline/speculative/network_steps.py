"""Steps of a drafting network: assembled, planned and run as those of the model are, on its own entries of the rows.

Entries that a draft wrote are candidates. They are committed as far as their tokens turn out to be right, and
overwritten otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from sightline.attention.planner import PlannedBatch
from sightline.core.batch import CAUSAL, CONTEXT, RowMask, RowWork, StepWork
from sightline.runner.networks import DraftRuntime, NetworkRuntime
from sightline.runner.sampling.sampler import RowSampling
from sightline.scheduler.sequence import Draft, DraftRoom, SequenceState


class NetworkOutputs(NamedTuple):
    """What a step of a drafting network gave."""

    logits: Tensor
    """[num_logits, vocab_size] fp32."""
    states: Tensor | None
    """[num_tokens, width]; None if the network gives none."""

    @property
    def given_states(self) -> Tensor:
        """`states` of a network that gives some. Raises `ValueError` if it does not."""
        if self.states is None:
            raise ValueError("expected a network that gives a state for each token, got one that gives none")
        return self.states


class DraftedRow(NamedTuple):
    """A row that a network guesses for, one token in each step."""

    table_row: int
    place: int
    """Where the first step is."""
    num_steps: int
    """Steps that it takes part in, from the first on."""
    mask: RowMask = CAUSAL

    @property
    def advance(self) -> int:
        """Places from one step to the next: none if nothing is written."""
        return 0 if self.mask is CONTEXT else 1


Choose: TypeAlias = Callable[[Tensor, int], Tensor]
"""The tokens [num_rows] int64 that rows of logits choose in a step, which is counted from 0."""


def drawn_at(sequence: SequenceState, place: int) -> RowSampling | None:
    """How a sequence's generated token at a place, counted from 0, is drawn; None if the likeliest is taken."""
    return None if sequence.drawing is None else RowSampling(sequence.drawing, place)


def choosing(draft: DraftRuntime, sequences: Sequence[SequenceState], ahead: int) -> Choose:
    """Chooses the tokens of each step for the first of `sequences`, as many as the step has rows.

    The first step chooses the token that is `ahead` places behind a sequence's next token.
    """

    def choose(logits: Tensor, step: int) -> Tensor:
        rows = sequences[: logits.shape[0]]
        return draft.choose(logits, [drawn_at(each, each.num_generated + ahead + step) for each in rows])

    return choose


class NetworkSteps:
    """Runs the steps of one network, and keeps the lengths of its rows."""

    def __init__(self, network: NetworkRuntime) -> None:
        self._network = network
        self._lengths = network.cache.lengths

    def length(self, row: int) -> int:
        """Entries of a row that are known to be right."""
        return self._lengths.committed(row)

    def launched(self, row: int) -> int:
        """Entries of a row that there are, right or not."""
        return self._lengths.launched(row)

    def commit(self, row: int, length: int) -> None:
        """Says that the first `length` entries of a row are right. Those behind them stay until `discard`."""
        self._lengths.commit(row, length)

    def discard(self, row: int, beyond: int | None = None) -> None:
        """Discards the entries of a row behind `beyond`; without it, those that are not known to be right."""
        self._lengths.settle(row, self._lengths.committed(row) if beyond is None else beyond)

    def run(
        self, work: Sequence[RowWork], chosen: Tensor | None = None, states: Tensor | None = None
    ) -> NetworkOutputs:
        """Computes the rows, in several steps if one cannot hold all their tokens.

        `chosen` are tokens that the device has, for rows that continue one; `states` [num_tokens, width] are those that
        the network takes.
        """
        outputs, start = [], 0
        for step in _steps(work, self._network.max_step_tokens):
            stop = start + sum(map(_num_tokens, step))
            outputs.append(self._run(step, chosen, None if states is None else states[start:stop]))
            start = stop
        if len(outputs) == 1:
            return outputs[0]
        made = [each.states for each in outputs if each.states is not None]
        return NetworkOutputs(torch.cat([each.logits for each in outputs]), torch.cat(made) if made else None)

    def roll_out(
        self, rows: Sequence[DraftedRow], tokens: Tensor, states: Tensor | None, choose: Choose
    ) -> list[Tensor]:
        """Guesses on, behind `tokens` [num_rows] int64 and the `states` [num_rows, width] that the network takes.

        `rows` are those with the most guesses first. Returns the tokens of each step, of as many rows as it has. All
        steps are planned before the first one runs, if they may be.
        """
        columns = [tokens]
        works = [_guessed(rows, step) for step in range(rows[0].num_steps if rows else 0)]
        network, lens = self._network, [len(tokens), *map(len, works)]
        ahead: tuple[PlannedBatch, ...] = ()
        if len(works) <= network.max_rollout:
            ahead = network.planner.rollout(
                [network.graphs.assemble(work, awaited=count) for work, count in zip(works, lens, strict=False)]
            )
        for index, work in enumerate(works):
            given = None if states is None else states[: len(work)]
            if ahead:
                ahead[index].batch.fill(columns[-1])
                outputs = self._finish(ahead[index], given)
            else:
                outputs = self._finish(network.planner.plan(network.graphs.assemble(work, columns[-1])), given)
            states = outputs.states
            columns.append(choose(outputs.logits, index))
        return columns[1:]

    def _run(self, work: Sequence[RowWork], chosen: Tensor | None, states: Tensor | None) -> NetworkOutputs:
        network = self._network
        return self._finish(network.planner.plan(network.graphs.assemble(StepWork.of(work), chosen)), states)

    def _finish(self, planned: PlannedBatch, states: Tensor | None) -> NetworkOutputs:
        runner = self._network.runner
        logits = runner.forward(planned, states)
        return NetworkOutputs(logits, runner.states(planned) if runner.gives_states else None)


def _guessed(rows: Sequence[DraftedRow], step: int) -> StepWork:
    """The rows of one step of a draft, each behind the token that the step before chose for it."""
    return StepWork.of(
        [
            RowWork(each.table_row, (), each.place + each.advance * step, 1, each.mask, unread=index)
            for index, each in enumerate(rows)
            if each.num_steps > step
        ]
    )


def _num_tokens(row: RowWork) -> int:
    return len(row.tokens) + (row.unread is not None)


def _steps(work: Sequence[RowWork], most: int) -> Iterator[list[RowWork]]:
    """The rows in steps of at most `most` tokens, in order. A row that does not fit is cut; its last part has its
    logits."""
    step, room = list[RowWork](), most
    for row in work:
        left = row
        while _num_tokens(left) > room:
            if room:
                step.append(replace(left, tokens=left.tokens[:room], num_logits=0, unread=None))
                left = replace(left, tokens=left.tokens[room:], context_len=left.context_len + room)
            yield step
            step, room = [], most
        step.append(left)
        room -= _num_tokens(left)
    yield step


def longest_first(rooms: Sequence[DraftRoom], indices: Iterable[int]) -> list[int]:
    """The indices by the number of tokens that their rooms have, so that the rows of each step are the first rows of
    the step before."""
    return sorted(indices, key=lambda index: -rooms[index].most)


def drafts_in_order(columns: Sequence[Tensor], order: Sequence[int], count: int) -> list[Draft]:
    """A draft for each of `count` rooms: `columns` has those of the rooms in `order`, the others get an empty one.

    Waits for the device.
    """
    drafts = [Draft()] * count
    for index, tokens in zip(order, _read_columns(columns), strict=True):
        drafts[index] = Draft(tuple(tokens))
    return drafts


def _read_columns(columns: Sequence[Tensor]) -> list[list[int]]:
    """The tokens of each row. A column has one token for each row that has not ended before it."""
    lens, tokens = [len(each) for each in columns], torch.cat(list(columns)).tolist()
    starts = [0, *accumulate(lens)]
    return [
        [tokens[start + row] for start, count in zip(starts, lens, strict=False) if row < count]
        for row in range(lens[0])
    ]
