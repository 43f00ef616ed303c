"""Steps of a drafting network: assembled, planned and run as those of the model are, on its own entries of the rows.

Entries that a draft wrote are candidates. They are committed as far as their tokens turn out to be right, and
overwritten otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from sightline.core.batch import RowWork, StepWork
from sightline.runner.networks import NetworkRuntime


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


class NetworkSteps:
    """Runs the steps of one network, and keeps the lengths of its rows."""

    def __init__(self, network: NetworkRuntime) -> None:
        self._network = network
        self._lengths = network.cache.lengths

    def length(self, row: int) -> int:
        """Entries of a row that are known to be right."""
        return self._lengths.committed(row)

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

    def _run(self, work: Sequence[RowWork], chosen: Tensor | None, states: Tensor | None) -> NetworkOutputs:
        network = self._network
        planned = network.planner.plan(network.graphs.assemble(StepWork.of(work), chosen))
        logits = network.runner.forward(planned, states)
        return NetworkOutputs(logits, network.runner.states(planned) if network.runner.gives_states else None)


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


def read_columns(columns: Sequence[Tensor]) -> list[list[int]]:
    """The tokens of each row, of which each column has one, if it has not ended. Waits for the device."""
    lens, tokens = [len(each) for each in columns], torch.cat(list(columns)).tolist()
    starts = [0, *accumulate(lens)]
    return [
        [tokens[start + row] for start, count in zip(starts, lens, strict=False) if row < count]
        for row in range(lens[0])
    ]
