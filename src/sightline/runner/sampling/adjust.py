"""Changes to the logits of single tokens before one is chosen: bias, penalties, and end tokens before `min_tokens`.

The state of a sequence is arrays of its distinct tokens and their counts, so the cost of a step depends on the length
of the sequences and not on the vocabulary. The arithmetic runs over all rows at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from sightline.core.request import EffectiveParams


class TokenAdjustment:
    """One sequence's bias, token counts and forbidden tokens."""

    def __init__(self, params: EffectiveParams, prompt_token_ids: Sequence[int]) -> None:
        self.params = params
        self.bias_tokens = numpy.array([token for token, _ in params.logit_bias], dtype=numpy.int64)
        self.bias_values = numpy.array([value for _, value in params.logit_bias], dtype=numpy.float32)
        self.end_tokens = numpy.array(sorted(params.eos_token_ids | params.stop_token_ids), dtype=numpy.int64)
        # Only the repetition penalty applies to tokens of the prompt.
        prompt = prompt_token_ids if params.repetition_penalty != 1.0 else ()
        self._tokens = numpy.unique(numpy.array(prompt, dtype=numpy.int64))
        self._amounts = numpy.zeros(len(self._tokens), dtype=numpy.float32)
        self._num_distinct = len(self._tokens)
        self._slot = {token: slot for slot, token in enumerate(self._tokens.tolist())}
        self._times: dict[int, int] = {}
        self.num_counted = 0
        """The number of generated tokens that were counted."""
        self.is_whole = True
        """False if an interruption left `count` half done: create a new one."""

    @property
    def tokens(self) -> NDArray[numpy.int64]:
        """The distinct tokens that penalties apply to, [num_distinct]."""
        return self._tokens[: self._num_distinct]

    @property
    def amounts(self) -> NDArray[numpy.float32]:
        """The presence and frequency penalty of each, [num_distinct]; 0 for tokens that are only in the prompt."""
        return self._amounts[: self._num_distinct]

    def count(self, generated: Sequence[int]) -> None:
        """Counts further generated tokens."""
        self.is_whole = False
        if self.params.counts_tokens:
            for token in generated:
                slot = self._slot.setdefault(token, self._num_distinct)
                if slot == self._num_distinct:
                    self._add(token)
                times = self._times[token] = self._times.get(token, 0) + 1
                self._amounts[slot] = self.params.presence_penalty + self.params.frequency_penalty * times
        self.num_counted += len(generated)
        self.is_whole = True

    def _add(self, token: int) -> None:
        if self._num_distinct == len(self._tokens):
            room = max(64, len(self._tokens))
            self._tokens = numpy.concatenate([self._tokens, numpy.zeros(room, dtype=numpy.int64)])
            self._amounts = numpy.concatenate([self._amounts, numpy.zeros(room, dtype=numpy.float32)])
        self._tokens[self._num_distinct] = token
        self._num_distinct += 1


@contextmanager
def adjusted(logits: Tensor, rows: Sequence[tuple[int, TokenAdjustment]]) -> Iterator[Tensor]:
    """Adjusts the given rows of the logits [num_rows, vocab_size] fp32 in place, and undoes it at the end.

    The order is that of other engines: bias, repetition, frequency and presence penalties, then forbidden tokens. It is
    done in place because a copy would cost more than all adjustments.
    """
    if not rows:
        yield logits
        return
    values = logits if logits.is_contiguous() else logits.contiguous()
    flat = values.view(-1)
    before: list[tuple[Tensor, Tensor]] = []

    def change(places: Tensor, new: Tensor, old: Tensor) -> None:
        before.append((places, old))
        flat.index_copy_(0, places, new)

    with torch.inference_mode():
        try:
            for places, amounts in _bias(rows, values):
                old = flat.index_select(0, places)
                change(places, old + amounts, old)
            for places, repetition, amounts in _penalties(rows, values):
                old = flat.index_select(0, places)
                change(places, _penalised(old, repetition, amounts), old)
            for places in _forbidden(rows, values):
                old = flat.index_select(0, places)
                change(places, torch.full_like(old, -torch.inf), old)
            yield values
        finally:
            for places, old in reversed(before):
                flat.index_copy_(0, places, old)


def _penalised(old: Tensor, repetition: Tensor, amounts: Tensor) -> Tensor:
    repeated = torch.where(old > 0, old / repetition, old * repetition)
    # Keep extreme logits finite: with an infinity nothing could be chosen.
    limit = torch.finfo(old.dtype).max
    return repeated.sub_(amounts).clamp_(-limit, limit)


def _bias(rows: Sequence[tuple[int, TokenAdjustment]], logits: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    biased = [(index, row) for index, row in rows if len(row.bias_tokens)]
    if biased:
        places = _places([(index, row.bias_tokens) for index, row in biased], logits)
        yield places, torch.from_numpy(numpy.concatenate([row.bias_values for _, row in biased])).to(logits.device)


def _penalties(rows: Sequence[tuple[int, TokenAdjustment]], logits: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    counted = [(index, row) for index, row in rows if len(row.tokens)]
    if counted:
        by_row = numpy.array([row.params.repetition_penalty for _, row in counted], dtype=numpy.float32)
        repetition = numpy.repeat(by_row, [len(row.tokens) for _, row in counted])
        amounts = numpy.concatenate([row.amounts for _, row in counted])
        places = _places([(index, row.tokens) for index, row in counted], logits)
        yield places, torch.from_numpy(repetition).to(logits.device), torch.from_numpy(amounts).to(logits.device)


def _forbidden(rows: Sequence[tuple[int, TokenAdjustment]], logits: Tensor) -> Iterator[Tensor]:
    early = [
        (index, row.end_tokens)
        for index, row in rows
        if row.num_counted < row.params.min_tokens and len(row.end_tokens)
    ]
    if early:
        yield _places(early, logits)


def _places(tokens_by_row: Sequence[tuple[int, NDArray[numpy.int64]]], logits: Tensor) -> Tensor:
    """The indices of the given tokens of each row in the flattened logits."""
    lengths = [len(tokens) for _, tokens in tokens_by_row]
    starts = numpy.array([index for index, _ in tokens_by_row], dtype=numpy.int64) * logits.shape[1]
    places = numpy.repeat(starts, lengths) + numpy.concatenate([tokens for _, tokens in tokens_by_row])
    return torch.from_numpy(places).to(logits.device)
