"""A subset of a step's tokens: a view if they are contiguous, otherwise a copy.

Composed by backends that make one kernel call per kind of rows. Does not know what the tokens are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers


@dataclass(frozen=True, eq=False)
class StepTokens:
    """Runs of tokens, one after the other."""

    count: int
    side_by_side: slice | None
    """The same tokens as a slice; None if they are not contiguous."""
    indices: Tensor | None
    """[count] int64; None if they are contiguous."""

    @staticmethod
    def planned(name: str, runs: Sequence[slice], buffers: PlanBuffers) -> StepTokens:
        count = sum(run.stop - run.start for run in runs)
        joined = joined_runs(runs)
        if len(joined) <= 1:
            return StepTokens(count, joined[0] if joined else slice(0, 0), None)
        indices = buffers.take(f"{name}.tokens", (count,), torch.int64)
        indices.copy_(spread_runs(runs, [0] * len(runs), indices.device)[1])
        return StepTokens(count, None, indices)

    def of(self, values: Tensor, scratch: Tensor | None = None) -> Tensor:
        """[count, ...]: a view, or a copy, placed in `scratch` [at least count, ...] if given."""
        if self.side_by_side is not None:
            return values[self.side_by_side]
        indices = self._indices()
        if scratch is None:
            return values.index_select(0, indices)
        return torch.index_select(values, 0, indices, out=scratch[: self.count])

    def put(self, target: Tensor, values: Tensor) -> None:
        if self.side_by_side is not None:
            target[self.side_by_side] = values
        else:
            target.index_copy_(0, self._indices(), values.to(target.dtype))

    def _indices(self) -> Tensor:
        assert self.indices is not None, "tokens that lie apart have indices"
        return self.indices


def joined_runs(runs: Sequence[slice]) -> tuple[slice, ...]:
    """Runs in order, with adjacent ones joined."""
    joined: list[slice] = []
    for run in runs:
        if joined and joined[-1].stop == run.start:
            joined[-1] = slice(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return tuple(joined)


def spread_runs(runs: Sequence[slice], labels: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The label of each number in the runs, and the numbers, run after run: [total] int64 each."""
    lens = [run.stop - run.start for run in runs]
    firsts, total = [], 0
    for run, length in zip(runs, lens, strict=True):
        firsts.append(run.start - total)
        total += length
    packed = torch.tensor([lens, list(labels), firsts], dtype=torch.int64).to(device, non_blocking=True)
    chosen = torch.repeat_interleave(packed[0], output_size=total)
    return packed[1][chosen], packed[2][chosen] + torch.arange(total, device=device)
