"""Runs a model and its modules for multi-token prediction as a drafter does, on given texts with given guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sightline.core.batch import RowWork, StepWork
from sightline.runner.runtime import Runtime
from support.tiny_mtp import Made

VOCAB_START = 3


class DepthOracle(Protocol):
    """A model with its modules."""

    def depths(self, text: Sequence[int], num_places: int) -> list[Made]:
        """What the model and the module of each depth give at the first places of a text."""
        ...


@dataclass
class DraftedText:
    """A row: the text that it will have, and how far each network has come."""

    tokens: Sequence[int]
    row: int
    lengths: list[int]
    """For the model and each depth, entries of the cache that will stay."""
    states: list[list[Tensor]]
    """For the model and each depth, the states of those places."""
    known: int = 0
    """Tokens that are known: accepted ones and the one behind them."""
    guesses: list[int] = field(default_factory=list)
    """Tokens behind the known ones, as last guessed."""

    @property
    def text(self) -> list[int]:
        return [*self.tokens[: self.known], *self.guesses]


class Rounds:
    """Runs all rows in the same steps and compares what every network gives with the oracle."""

    def __init__(self, runtime: Runtime, oracle: DepthOracle, texts: Sequence[Sequence[int]], chunk: int) -> None:
        self._runtime = runtime
        self._oracle = oracle
        self._chunk = chunk
        self._rows = []
        self.errors: list[float] = []
        """The largest error of each comparison, of the scale of the numbers."""
        self.remakes_guessed = True
        """False for a drafter that takes entries made from guessed tokens for true ones."""
        self.takes_states_of_model = False
        """True for a drafter that gives the model's states to every depth."""
        self.compares_model = True
        self.num_behind = 0
        """How far the tokens that modules get are behind those that they should get."""
        for text in texts:
            row = runtime.store.open_row()
            runtime.store.grow_row(row, len(text))
            networks = len(runtime.networks)
            self._rows.append(DraftedText(text, row, [0] * networks, [[] for _ in range(networks)]))

    @property
    def num_modules(self) -> int:
        return len(self._runtime.networks) - 1

    def prefill(self, prompt_lens: Sequence[int], right: Sequence[int]) -> None:
        """Runs the prompts and the modules on them, with drafts of which the first `right` tokens are right."""
        for each, length in zip(self._rows, prompt_lens, strict=True):
            each.known = length
        self._advance(0, prompt_lens)
        self._draft(right)

    def verify(self, accepted: Sequence[int], right: Sequence[int]) -> None:
        """Runs the model on the drafts, of which `accepted` tokens are kept, then the modules on what is kept."""
        kept = [each.known + count for each, count in zip(self._rows, accepted, strict=True)]
        self._advance(0, [len(each.text) for each in self._rows])
        for each, length in zip(self._rows, kept, strict=True):
            self._keep(0, each, length)
            each.known = length
        self._draft(right)

    def _draft(self, right: Sequence[int]) -> None:
        """Adds the next token of every row and a draft behind it, and runs the modules."""
        for each, count in zip(self._rows, right, strict=True):
            each.known += 1
            truth = each.tokens[each.known : each.known + self.num_modules]
            other = [VOCAB_START + (token + 1) % 90 for token in truth]
            each.guesses = [*truth[:count], *other[count:]]
        for depth in range(1, self.num_modules + 1):
            stops = [each.known - 1 for each in self._rows]
            self._advance(depth, stops)
            for each, stop in zip(self._rows, stops, strict=True):
                # Places whose token is guessed are made again.
                self._keep(depth, each, stop - (depth - 1) if self.remakes_guessed else stop)

    def _keep(self, depth: int, each: DraftedText, length: int) -> None:
        lengths = self._runtime.networks[depth].cache.lengths
        lengths.commit(each.row, length)
        lengths.settle(each.row, length)
        each.lengths[depth] = length
        del each.states[depth][length:]

    def _advance(self, depth: int, stops: Sequence[int]) -> None:
        """Runs the network of a depth on all places before `stops`, in chunks, and compares each with the oracle."""
        expected = [self._expected(each, stop)[depth] for each, stop in zip(self._rows, stops, strict=True)]
        while any(each.lengths[depth] < stop for each, stop in zip(self._rows, stops, strict=True)):
            active = [i for i, each in enumerate(self._rows) if each.lengths[depth] < stops[i]]
            spans = {i: self._span(self._rows[i].lengths[depth], stops[i]) for i in active}
            made = self._step(depth, spans)
            for i, (start, stop) in spans.items():
                for got, wanted in zip(made[i], expected[i], strict=True) if depth or self.compares_model else ():
                    error = (got - wanted[start:stop]).abs().max() / wanted.abs().max()
                    self.errors.append(float(error))
                self._rows[i].states[depth] += list(made[i].states)
                self._rows[i].lengths[depth] = stop

    def _span(self, start: int, stop: int) -> tuple[int, int]:
        return start, min(start + self._chunk, stop)

    def _step(self, depth: int, spans: dict[int, tuple[int, int]]) -> dict[int, Made]:
        network = self._runtime.networks[depth]
        work, given = [], []
        for i, (start, stop) in spans.items():
            each = self._rows[i]
            ahead = max(depth - self.num_behind, 0)
            tokens = each.text[start + ahead : stop + ahead]
            work.append(RowWork(each.row, tokens, start, num_logits=len(tokens)))
            source = each.states[0 if self.takes_states_of_model else depth - 1]
            given += source[start:stop] if depth else []
        planned = network.planner.plan(network.graphs.assemble(StepWork.of(work)))
        logits = network.runner.forward(planned, torch.stack(given) if depth else None)
        states = network.runner.states(planned)
        sizes = [stop - start for start, stop in spans.values()]
        parts = zip(spans, torch.split(states, sizes), torch.split(logits, sizes), strict=True)
        return {i: Made(own, logits_of) for i, own, logits_of in parts}

    def _expected(self, each: DraftedText, num_places: int) -> list[Made]:
        """What the oracle gives for the text with its guesses. Tokens of other depths may be missing at the end."""
        text = each.text
        padded = [*text, *[VOCAB_START] * (num_places + self.num_modules - len(text))]
        return self._oracle.depths(padded, num_places)
