"""What an embedding step gives its rows: their tokens' states, pooled; and a text's life while it is embedded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sightline.core.request import FinishReason
from sightline.models.loading.pooling import Pooling, PoolingKind
from sightline.scheduler.sequence import RowResult, ScheduledRow, SequenceState


@dataclass(eq=False)
class LiveText:
    """A text in the step loop."""

    sequence: SequenceState
    error: str | None = None
    finish_reason: FinishReason | None = None
    vector: Tensor | None = None
    """[state_size] fp32 on the CPU, once the whole text is computed."""
    _sum: tuple[int, Tensor] | None = None
    """How many tokens were pooled, and the sum of their states."""

    def sum_with(self, row: ScheduledRow, states: Tensor) -> Tensor:
        """The sum up to the row's end, given that of the row's own states, both [state_size]."""
        if self._sum is None or row.context_len == 0:
            return states
        pooled_len, total = self._sum
        return total if pooled_len == row.seq_len else total + states

    def keep_sum(self, row: ScheduledRow, total: Tensor) -> None:
        self._sum = (row.seq_len, total)

    def take_in(self) -> FinishReason | None:
        return None if self.vector is None else FinishReason.STOP

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason

    def break_off(self, error: str) -> None:
        self.error, self.finish_reason = error, FinishReason.ERROR


@dataclass(frozen=True, eq=False)
class Pooled:
    """Each row's pooled states, on the device. No token is chosen."""

    rows: Sequence[ScheduledRow]
    lives: Sequence[LiveText]
    sums: Tensor
    """[num_rows, state_size] fp32."""
    pooling: Pooling
    places: ClassVar[Mapping[SequenceState, int]] = {}

    @property
    def next_tokens(self) -> Tensor:
        return torch.empty(0, dtype=torch.int64, device=self.sums.device)

    def results(self) -> _Vectors:
        """Waits for the device."""
        sums = self.sums.cpu()
        totals = torch.stack(
            [live.sum_with(row, each) for row, live, each in zip(self.rows, self.lives, sums, strict=True)]
        )
        pooled = totals
        if self.pooling.kind is PoolingKind.MEAN:
            pooled = totals / torch.tensor([row.seq_len for row in self.rows], dtype=totals.dtype)[:, None]
        vectors = F.normalize(pooled, dim=-1) if self.pooling.normalise else pooled
        return _Vectors(self, totals, vectors, pooled.isfinite().all(dim=-1).tolist())


class _Vectors(NamedTuple):
    step: Pooled
    totals: Tensor
    vectors: Tensor
    """[num_rows, state_size] fp32 on the CPU."""
    finite: list[bool]

    def take(self, index: int) -> RowResult:
        row, live = self.step.rows[index], self.step.lives[index]
        live.keep_sum(row, self.totals[index])
        if not self.finite[index]:
            live.error = "the model's states held a NaN or an infinity; check the weights, or use dtype float32"
        elif row.completes:
            live.vector = self.vectors[index]
        return RowResult(row.seq_len)


def pool(
    rows: Sequence[ScheduledRow], lives: Sequence[LiveText], inputs: Tensor, states: Tensor, pooling: Pooling
) -> Pooled:
    """Pools the states [num_logits, state_size] of each row, whatever its input tokens are."""
    del inputs
    counts = [row.num_logits for row in rows]
    if pooling.kind is PoolingKind.CLS:
        starts = torch.tensor([0, *counts[:-1]], device=states.device).cumsum(0)
        return Pooled(rows, lives, states.index_select(0, starts), pooling)
    if counts.count(1) == len(counts):
        return Pooled(rows, lives, states, pooling)
    by_row = torch.repeat_interleave(torch.tensor(counts, device=states.device))
    sums = states.new_zeros((len(counts), states.shape[1])).index_add_(0, by_row, states)
    return Pooled(rows, lives, sums, pooling)
