"""Chooses tokens from logits.

A token depends only on its row's logits, its parameters, the tokens before it, its seed and its place in the output:
the noise is a function of (seed, place, token), so neither the batch nor a recomputation changes it. Rounding of the
logits changes a choice only if two tokens were about equally good.

    raw logits ─ bias, penalties, forbidden tokens ─ masks ─ temperature ─ top-k ─ top-p ─ min-p ─ draw
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from sightline.core.request import EffectiveParams
from sightline.core.transfer import sent
from sightline.kernels.greedy import best_tokens
from sightline.runner.sampling.adjust import (
    AdjustArrays,
    AdjustedRow,
    Adjustments,
    TokenAdjustment,
    adjust_arrays,
    adjusted,
)
from sightline.runner.sampling.draw import Choice, draw
from sightline.runner.sampling.masks import masked, row_masks
from sightline.runner.sampling.noise import noise_keys
from sightline.runner.sampling.race import race_arrays, run


@dataclass(eq=False, slots=True)
class RowSampling:
    """How one row chooses its next token. Treat as immutable; not frozen, because one is created per row per step."""

    params: EffectiveParams
    place: int
    """The number of tokens that the sequence has generated before this one."""
    adjustment: TokenAdjustment | None = None
    """The bias and token counts if the parameters adjust logits, otherwise None."""

    unread_at: int | None = None
    """Where the step's input tokens hold the token before this one, if the adjustment has not counted that one: a step
    in flight chooses it, and only the device knows it."""
    mask: NDArray[numpy.int64] | None = None
    """[num_words]: the only tokens that may come, bit i of word w for token 64 w + i, at least one; None: all may."""

    def __post_init__(self) -> None:
        if self.params.adjusts_logits != (self.adjustment is not None):
            raise ValueError(f"expected an adjustment exactly for parameters that adjust logits, got {self.adjustment}")
        if self.adjustment is not None:
            num_unread = int(self.unread_at is not None)
            if self.adjustment.num_counted != self.place - num_unread:
                expected = self.place - num_unread
                raise ValueError(f"expected {expected} tokens counted, got {self.adjustment.num_counted}")
            if num_unread and self.params.needs.max_unread_tokens == 0:
                raise ValueError("expected every token counted with bad words of several tokens, got one less")


@dataclass(frozen=True)
class Chosen:
    """The choice for each row, on the device, so that the next step can use it before the host reads it."""

    packed: Tensor
    """[2, num_rows] int64, contiguous: `tokens`, then `finite`."""

    @property
    def tokens(self) -> Tensor:
        """[num_rows] int64."""
        return self.packed[0]

    @property
    def finite(self) -> Tensor:
        """[num_rows] int64: 0 if the row's logits held a NaN or an infinity, otherwise 1. If 0, its token is
        meaningless."""
        return self.packed[1]


BestTokens: TypeAlias = Callable[[Tensor, Tensor], None]
"""Writes the likeliest token of each row and whether its logits are finite, as `kernels.greedy.best_tokens` does."""


def choose(
    logits: Tensor, rows: Sequence[RowSampling], inputs: Tensor | None = None, best: BestTokens = best_tokens
) -> Chosen:
    """Chooses one token for each row of logits [num_rows, vocab_size] fp32. The logits are unchanged afterwards.

    `inputs` are the step's input tokens [num_tokens] int64, which rows with `unread_at` need; `best` is used on a GPU,
    and has the kernels for it. Does not wait for a GPU.
    """
    if logits.device.type == "cpu":
        finite = logits.amax(dim=-1).isfinite() & logits.amin(dim=-1).isfinite()
        return Chosen(torch.stack([choose_on_host(logits, rows, inputs, finite), finite]))
    return Chosen(choose_unread(logits, rows, inputs, best))


def choose_on_host(logits: Tensor, rows: Sequence[RowSampling], inputs: Tensor | None, finite: Tensor) -> Tensor:
    """One token for each row [num_rows] int64, in the fastest way for a CPU; logits and flags are there."""
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0.0]
    if drawn:
        # Skip rows with NaN or infinite logits: sampling them would not terminate.
        usable = finite.tolist()
        drawn = [index for index in drawn if usable[index]]
    masks = row_masks([row.mask for row in rows])
    with _adjusted(logits, rows, inputs) as adjusted_logits, masked(adjusted_logits, masks) as values:
        if not drawn:
            return torch.from_numpy(values.numpy().argmax(-1))
        some, tokens = values, torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        if len(drawn) < len(rows):
            some, tokens = values[drawn], torch.from_numpy(values.numpy().argmax(-1))
        chosen = [rows[index] for index in drawn]
        choices = [Choice(row.params, key) for row, key in zip(chosen, _keys(chosen).tolist(), strict=True)]
        tokens[drawn] = torch.tensor(draw(some, choices), dtype=torch.int64, device=logits.device)
        return tokens


def choose_unread(logits: Tensor, rows: Sequence[RowSampling], inputs: Tensor | None, best: BestTokens) -> Tensor:
    """The tokens and whether they are finite, as in `Chosen`, on any device without a host read.

    All parameters reach the device by one copy. A step of rows that only take their likeliest token needs none.
    """
    packed = torch.empty((2, len(rows)), dtype=torch.int64, device=logits.device)
    best(logits, packed)
    drawn = [(index, row) for index, row in enumerate(rows) if row.params.temperature > 0.0]
    changes, masks = _changes(rows, logits.shape[1]), row_masks([row.mask for row in rows])
    is_changed = changes is not None or masks is not None
    if not drawn and not is_changed:
        return packed
    tokens = packed[0]
    keys = _keys([row for _, row in drawn])
    race = race_arrays([(index, row.params) for index, row in drawn], keys, logits.shape[1])
    integers, numbers, *tensors = sent([race.integers, race.numbers, *(changes or ())], logits.device)
    with ExitStack() as held:
        values = logits
        if changes is not None:
            values = held.enter_context(adjusted(values, Adjustments(*tensors), inputs))
        values = held.enter_context(masked(values, masks))
        if is_changed and len(drawn) < len(rows):
            tokens.copy_(values.argmax(-1))
        if drawn:
            on_device = race.on_device(integers, numbers)
            tokens.index_copy_(0, on_device.index, run(values, on_device))
    return packed


def _adjusted(logits: Tensor, rows: Sequence[RowSampling], inputs: Tensor | None) -> AbstractContextManager[Tensor]:
    changes = _changes(rows, logits.shape[1])
    if changes is None:
        return nullcontext(logits)
    return adjusted(logits, Adjustments(*sent(changes, logits.device)), inputs)


def _changes(rows: Sequence[RowSampling], vocab_size: int) -> AdjustArrays | None:
    """The adjustments of the rows; None if no row has any."""
    adjusting = [
        AdjustedRow(index, row.adjustment, row.unread_at)
        for index, row in enumerate(rows)
        if row.adjustment is not None
    ]
    return adjust_arrays(adjusting, vocab_size) if adjusting else None


def _keys(rows: Sequence[RowSampling]) -> NDArray[numpy.uint64]:
    return noise_keys([row.params.seed for row in rows], [row.place for row in rows])
