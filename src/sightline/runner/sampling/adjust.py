"""Changes to the logits of single tokens before one is chosen: bias, penalties, and tokens that must not come.

Those are tokens that are not in `allowed_token_ids`, tokens that would complete a bad word, and end tokens before
`min_tokens`. Whoever makes the parameters sees to it that one token is always left.

The state of a sequence is arrays of its distinct tokens and their counts, so the cost of a step depends on the length
of the sequences and not on the vocabulary. The arithmetic runs over all rows at once, on the device, without a host
read. While a step is in flight the host does not know a row's last token: the device then counts it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import NamedTuple, TypeVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from sightline.core.request import EffectiveParams

ScalarT = TypeVar("ScalarT", bound=numpy.generic)


class BadWords:
    """Runs of tokens that must not be generated, and how far the latest tokens have come in each."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._single = sorted({word[0] for word in words if len(word) == 1})
        self._longer: dict[int, list[tuple[int, ...]]] = {}
        """Words of several tokens, by the last token but one."""
        for word in words:
            if len(word) > 1:
                self._longer.setdefault(word[-2], []).append(word)
        self._reach = max(map(len, words), default=1) - 1
        self._latest: tuple[int, ...] = ()

    def follow(self, generated: Sequence[int]) -> None:
        """Takes note of generated tokens."""
        if self._reach:
            self._latest = (*self._latest, *generated)[-self._reach :]

    @property
    def next_tokens(self) -> NDArray[numpy.int64]:
        """The tokens that would complete a word now; one may be listed twice."""
        latest = self._latest
        near = self._longer.get(latest[-1], ()) if latest else ()
        ending = [word[-1] for word in near if latest[1 - len(word) :] == word[:-1]]
        return numpy.array([*self._single, *ending], dtype=numpy.int64)


class TokenAdjustment:
    """One sequence's bias, token counts, allowed and forbidden tokens."""

    def __init__(self, params: EffectiveParams, prompt_token_ids: Sequence[int]) -> None:
        self.params = params
        tokens, values = params.logit_bias.packed
        self.bias_tokens = numpy.frombuffer(tokens, dtype=numpy.int64)
        self.bias_values = numpy.frombuffer(values, dtype=numpy.float32)
        self.end_tokens = numpy.array(sorted(params.eos_token_ids | params.stop_token_ids), dtype=numpy.int64)
        allowed = params.allowed_token_ids
        self.allowed = None if allowed is None else numpy.frombuffer(allowed.packed, dtype=numpy.int64)
        self._bad_words = BadWords(params.bad_words)
        # Only the repetition penalty applies to tokens of the prompt.
        prompt = prompt_token_ids if params.repetition_penalty != 1.0 else ()
        self._tokens = numpy.unique(numpy.array(prompt, dtype=numpy.int64))
        self._times = numpy.zeros(len(self._tokens), dtype=numpy.float64)
        self._num_distinct = len(self._tokens)
        self._slot = {token: slot for slot, token in enumerate(self._tokens.tolist())}
        self.num_counted = 0
        """The number of generated tokens that were counted."""
        self.is_whole = True
        """False if an interruption left `count` half done: create a new one."""

    @property
    def tokens(self) -> NDArray[numpy.int64]:
        """The distinct tokens that penalties apply to, [num_distinct]."""
        return self._tokens[: self._num_distinct]

    @property
    def times(self) -> NDArray[numpy.float64]:
        """How often each was generated, [num_distinct]; 0 for tokens that are only in the prompt."""
        return self._times[: self._num_distinct]

    def count(self, generated: Sequence[int]) -> None:
        """Counts further generated tokens."""
        self.is_whole = False
        if self.params.counts_tokens:
            for token in generated:
                slot = self._slot.setdefault(token, self._num_distinct)
                if slot == self._num_distinct:
                    self._add(token)
                self._times[slot] += 1
        self._bad_words.follow(generated)
        self.num_counted += len(generated)
        self.is_whole = True

    def after(self, token: int) -> TokenAdjustment:
        """The adjustment of a sequence with one more token. This one stays as it is."""
        found = copy(self)
        found._bad_words, found._slot = copy(self._bad_words), dict(self._slot)
        found._tokens, found._times = self._tokens.copy(), self._times.copy()
        found.count([token])
        return found

    def forbidden(self, num_unread: int) -> NDArray[numpy.int64]:
        """The tokens that must not come next, beside those that are not allowed at all.

        `num_unread` tokens were generated after those that were counted.
        """
        bad = self._bad_words.next_tokens
        is_early = self.num_counted + num_unread < self.params.min_tokens
        return numpy.concatenate([bad, self.end_tokens]) if is_early else bad

    def _add(self, token: int) -> None:
        if self._num_distinct == len(self._tokens):
            room = max(64, len(self._tokens))
            self._tokens = numpy.concatenate([self._tokens, numpy.zeros(room, dtype=numpy.int64)])
            self._times = numpy.concatenate([self._times, numpy.zeros(room)])
        self._tokens[self._num_distinct] = token
        self._num_distinct += 1


class AdjustedRow(NamedTuple):
    """A row whose logits are adjusted."""

    logits_row: int
    """Which row of the logits it is."""
    adjustment: TokenAdjustment
    unread_at: int | None = None
    """Where the step's input tokens hold the row's last token, if the host does not know that one."""

    @property
    def is_counted(self) -> bool:
        return len(self.adjustment.tokens) > 0 or (self.unread_at is not None and self.adjustment.params.counts_tokens)

    @property
    def forbidden(self) -> NDArray[numpy.int64]:
        return self.adjustment.forbidden(int(self.unread_at is not None))


class AdjustArrays(NamedTuple):
    """The adjustments of all rows, on the host; to be copied to the device."""

    bias_places: NDArray[numpy.int64]
    """Places are indices in the flattened logits."""
    bias: NDArray[numpy.float64]
    counted_rows: NDArray[numpy.int64]
    """[num_counted]: the rows of the logits that have penalties."""
    penalties: NDArray[numpy.float64]
    """[3, num_counted]: repetition, presence and frequency penalty of each."""
    owners: NDArray[numpy.int64]
    """[num_entries]: for each distinct token of these rows, which of them it is of."""
    tokens: NDArray[numpy.int64]
    times: NDArray[numpy.float64]
    """[num_entries]: how often the token was generated, as far as the host knows."""
    late: NDArray[numpy.int64]
    """[num_late]: which of the rows with penalties have a last token that the host does not know."""
    unread_at: NDArray[numpy.int64]
    """[num_late]: where the step's input tokens hold it."""
    allowed_rows: NDArray[numpy.int64]
    """The rows of the logits in which only some tokens may come."""
    allowed_places: NDArray[numpy.int64]
    forbidden_places: NDArray[numpy.int64]


class Adjustments(NamedTuple):
    """The same on the device."""

    bias_places: Tensor
    bias: Tensor
    counted_rows: Tensor
    penalties: Tensor
    owners: Tensor
    tokens: Tensor
    times: Tensor
    late: Tensor
    unread_at: Tensor
    allowed_rows: Tensor
    allowed_places: Tensor
    forbidden_places: Tensor


def adjust_arrays(rows: Sequence[AdjustedRow], vocab_size: int) -> AdjustArrays:
    """The adjustments of some rows of logits [num_rows, vocab_size]."""
    biased = [row for row in rows if len(row.adjustment.bias_tokens)]
    counted = [row for row in rows if row.is_counted]
    late = [(place, row.unread_at) for place, row in enumerate(counted) if row.unread_at is not None]
    listed = [(row.logits_row, row.adjustment.allowed) for row in rows if row.adjustment.allowed is not None]
    params = [row.adjustment.params for row in counted]
    penalties = [[each.repetition_penalty, each.presence_penalty, each.frequency_penalty] for each in params]
    return AdjustArrays(
        bias_places=_places([(row.logits_row, row.adjustment.bias_tokens) for row in biased], vocab_size),
        bias=_joined([row.adjustment.bias_values.astype(numpy.float64) for row in biased], numpy.float64),
        counted_rows=numpy.array([row.logits_row for row in counted], dtype=numpy.int64),
        penalties=numpy.array(penalties, dtype=numpy.float64).reshape(-1, 3).T.copy(),
        owners=numpy.repeat(numpy.arange(len(counted)), [len(row.adjustment.tokens) for row in counted]),
        tokens=_joined([row.adjustment.tokens for row in counted], numpy.int64),
        times=_joined([row.adjustment.times for row in counted], numpy.float64),
        late=numpy.array([place for place, _ in late], dtype=numpy.int64),
        unread_at=numpy.array([at for _, at in late], dtype=numpy.int64),
        allowed_rows=numpy.array([index for index, _ in listed], dtype=numpy.int64),
        allowed_places=_places(listed, vocab_size),
        forbidden_places=_places([(row.logits_row, row.forbidden) for row in rows], vocab_size),
    )


@contextmanager
def adjusted(logits: Tensor, adjustments: Adjustments, inputs: Tensor | None) -> Iterator[Tensor]:
    """Adjusts the logits [num_rows, vocab_size] fp32 in place, and undoes it at the end.

    `inputs` are the step's input tokens [num_tokens] int64, if a row has one that the host does not know. The order is
    that of other engines: bias, repetition, frequency and presence penalties, then forbidden tokens. It is done in
    place because a copy would cost more than all adjustments. Only rows with `allowed_token_ids` are copied.
    """
    values = logits if logits.is_contiguous() else logits.contiguous()
    flat = values.view(-1)
    before: list[tuple[Tensor, Tensor, Tensor]] = []

    def change(places: Tensor, new: Tensor, old: Tensor) -> None:
        before.append((flat, places, old))
        flat.index_copy_(0, places, new)

    with torch.inference_mode():
        try:
            if len(places := adjustments.bias_places):
                old = flat.index_select(0, places)
                change(places, old + adjustments.bias.float(), old)
            if len(adjustments.counted_rows):
                places, repetition, amounts = _penalties(adjustments, inputs, logits.shape[1])
                old = flat.index_select(0, places)
                change(places, _penalised(old, repetition, amounts), old)
            # After the penalties, which would make an infinity finite.
            if len(indices := adjustments.allowed_rows):
                places = adjustments.allowed_places
                kept = flat.index_select(0, places)
                before.append((values, indices, values.index_select(0, indices)))
                values.index_fill_(0, indices, -torch.inf)
                flat.index_copy_(0, places, kept)
            if len(places := adjustments.forbidden_places):
                old = flat.index_select(0, places)
                change(places, torch.full_like(old, -torch.inf), old)
            yield values
        finally:
            for changed, places, old in reversed(before):
                changed.index_copy_(0, places, old)


def _penalised(old: Tensor, repetition: Tensor, amounts: Tensor) -> Tensor:
    repeated = torch.where(old > 0, old / repetition, old * repetition)
    # Keep extreme logits finite: with an infinity nothing could be chosen.
    limit = torch.finfo(old.dtype).max
    return repeated.sub_(amounts).clamp_(-limit, limit)


def _penalties(adjustments: Adjustments, inputs: Tensor | None, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places, and the repetition penalty and the amount to subtract at each, both fp32.

    A token that the host does not know adds an entry to its row. If the token has an entry already, both are equal.
    """
    owners, tokens, times = adjustments.owners, adjustments.tokens, adjustments.times
    late = adjustments.late
    if len(late):
        if inputs is None:
            raise ValueError("expected the step's input tokens with rows whose last token is not read, got none")
        unread = inputs.index_select(0, adjustments.unread_at)
        last = torch.full_like(adjustments.counted_rows, -1).index_copy_(0, late, unread)
        again = tokens == last.index_select(0, owners)
        counted = times.new_zeros(last.shape).index_add_(0, owners, times.where(again, 0.0)).index_select(0, late)
        times = torch.cat([times + again, counted + 1.0])
        owners, tokens = torch.cat([owners, late]), torch.cat([tokens, unread])
    repetition, presence, frequency = adjustments.penalties.index_select(1, owners)
    amounts = (presence + frequency * times).where(times > 0.0, 0.0)
    places = adjustments.counted_rows.index_select(0, owners) * vocab_size + tokens
    return places, repetition.float(), amounts.float()


def _places(tokens_by_row: Sequence[tuple[int, NDArray[numpy.int64]]], vocab_size: int) -> NDArray[numpy.int64]:
    """The indices of the given tokens of each row in the flattened logits."""
    lengths = [len(tokens) for _, tokens in tokens_by_row]
    starts = numpy.array([index for index, _ in tokens_by_row], dtype=numpy.int64) * vocab_size
    return numpy.repeat(starts, lengths) + _joined([tokens for _, tokens in tokens_by_row], numpy.int64)


def _joined(arrays: Sequence[NDArray[ScalarT]], dtype: type[ScalarT]) -> NDArray[ScalarT]:
    return numpy.concatenate(arrays) if arrays else numpy.zeros(0, dtype=dtype)
