"""Steps that are cut in two by rows, so that one half computes while the other waits for what ranks exchange.

    Batch ──cut──▶ two Batches, unplanned ──plan, a lane each──▶ two PlannedBatches ──at once──▶ outputs, joined

A half is a new batch, which no plan belongs to: it cannot run on the plan of the whole. Both end before the next step
begins. Does not know ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

import torch

from sightline.core.batch import Batch

SMALLEST_CUT = 32
"""The tokens of the smallest step that is cut: halves of fewer wait more than they compute."""
_T = TypeVar("_T")


def first_half(batch: Batch) -> int:
    """The rows of the first half, with about as many tokens as the second; 0 if the step is not to be cut."""
    lens = batch.work.query_lens
    if batch.memory.is_fixed or len(lens) < 2 or sum(lens) < SMALLEST_CUT:
        return 0
    half, before, rows = sum(lens) / 2, 0, 0
    while rows < len(lens) - 1 and (rows == 0 or before + lens[rows] / 2 < half):
        before += lens[rows]
        rows += 1
    return rows


class SecondThread:
    """Runs the second half of steps, on a GPU in a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pool = ThreadPoolExecutor(1, "sightline-half")

    def both(self, first: Callable[[], _T], second: Callable[[], _T]) -> tuple[_T, _T]:
        """The results of both, which run at once. Later work of the calling thread follows both."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        beside = self._pool.submit(self._run, second)
        try:
            ours = first()
        finally:
            # The second half must not run on when the step has failed.
            error = beside.exception()
        if error is not None:
            raise error
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return ours, beside.result()

    def _run(self, work: Callable[[], _T]) -> _T:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            return work()
