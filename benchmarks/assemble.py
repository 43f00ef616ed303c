"""Times the host's work before the forward of a decode step: `python benchmarks/assemble.py`.

    rows       what the scheduled rows compute, as `RowWork`
    assemble   the batch: checked, and copied to the memory that a captured graph reads
    plan       the plan with its certificate, by the Triton backend, which launches nothing to plan

No model and no GPU are needed: the copy to the device is one within host memory. Every row continues a token of a step
in flight, as with `async_scheduling`. The batch is checked against the table before any time is reported. Prints
medians and the least of several steps as a Markdown table, in milliseconds of elapsed time.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from random import Random
from typing import TypeVar

import torch

from sightline.attention.backends.triton.backend import TritonBackend
from sightline.attention.bindings import GroupBinding
from sightline.attention.contract import BackendContext, StepLimits
from sightline.attention.groups import group_layers
from sightline.attention.planner import Planner
from sightline.attention.sparse.coordinator import ResidentEntries
from sightline.attention.spec import SoftmaxSpec
from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.cache.pools import CacheLimits
from sightline.cache.store import CacheStore
from sightline.core.batch import CAUSAL, StepWork
from sightline.core.request import Request, RowNeeds
from sightline.engine.launch import rows_work
from sightline.kernels.cpu.program import inline_launcher
from sightline.runner.graphs import Graphs
from sightline.scheduler.sequence import ScheduledRow, SequenceState

T = TypeVar("T")
CPU = torch.device("cpu")
PAGE_SIZE = 16
CONTEXT_LEN = 512


class DecodeSteps:
    """Rows in a cache that all decode, in a bucket of their number."""

    def __init__(self, num_rows: int, num_steps: int) -> None:
        longest = 2 * CONTEXT_LEN + num_steps
        num_pages = 1 + num_rows * -(-longest // PAGE_SIZE)
        spec = SoftmaxSpec(2, 1, 16, 1.0)
        groups = group_layers([spec])
        limits = CacheLimits(num_pages, PAGE_SIZE, num_rows, longest)
        self._store = store = CacheStore([group.cache_spec(torch.float32) for group in groups], limits, CPU)
        workspace = Workspace(CPU, 1 << 30)
        steps = StepLimits(num_rows, num_rows, longest, (MAIN_LANE,), max_rollout=0)
        bindings = [
            GroupBinding.alone(
                group,
                cache,
                TritonBackend(
                    BackendContext(
                        group.name,
                        spec,
                        cache,
                        workspace,
                        steps,
                        torch.float32,
                        CPU,
                        inline_launcher(),
                        ResidentEntries(cache),
                    )
                ),
                TritonBackend.capabilities[0],
            )
            for group, cache in zip(groups, store.groups, strict=True)
        ]
        self._planner = Planner(bindings, steps, store.lengths, workspace)
        self._graphs = Graphs([num_rows], store, store.main, self._planner, bindings)
        draw = Random(0)
        self._sequences = [self._open(draw.randint(CONTEXT_LEN // 2, 2 * CONTEXT_LEN)) for _ in range(num_rows)]
        self._chosen = torch.arange(num_rows)
        self.seconds: dict[str, list[float]] = {"rows": [], "assemble": [], "plan": []}

    def _open(self, context_len: int) -> SequenceState:
        request = Request("", None, (0,) * context_len, RowNeeds(max_new_tokens=1 << 20))
        sequence = SequenceState(request)
        sequence.table_row = self._store.open_row()
        self._store.grow_row(sequence.table_row, context_len)
        self._store.fill_row(sequence.table_row, context_len)
        return sequence

    def step(self) -> None:
        """Times one step, and checks it."""
        store = self._store
        contexts = [store.lengths.launched(each.table_row or 0) for each in self._sequences]
        scheduled = []
        for sequence, context_len in zip(self._sequences, contexts, strict=True):
            assert sequence.table_row is not None
            store.grow_row(sequence.table_row, context_len + 1)
            scheduled.append(ScheduledRow(sequence, sequence.table_row, context_len, 1, True, False))
        unread = {sequence: place for place, sequence in enumerate(self._sequences)}
        work = self._timed("rows", lambda: rows_work(scheduled, CAUSAL, unread))
        batch = self._timed("assemble", lambda: self._graphs.assemble(work, self._chosen))
        self._timed("plan", lambda: self._planner.plan(batch))
        self._check(work, batch.pools["group0.kv"].write_slots, batch.tokens)
        for sequence in self._sequences:
            assert sequence.table_row is not None
            store.lengths.advance(sequence.table_row, store.lengths.launched(sequence.table_row) + 1)
            store.lengths.commit(sequence.table_row, store.lengths.launched(sequence.table_row))
            sequence.tokens.append(0)

    def _timed(self, name: str, call: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = call()
        self.seconds[name].append(time.perf_counter() - start)
        return result

    def _check(self, work: StepWork, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        table = self._store.pools[0].table
        rows, entries = torch.tensor(work.table_rows), torch.tensor(work.context_lens)
        if not torch.equal(slots, table.slots(rows, entries, PAGE_SIZE)) or not torch.equal(tokens, self._chosen):
            raise SystemExit("expected the slots and tokens of every row, got others; nothing is reported")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"context {CONTEXT_LEN} on average, {given.steps} steps\n")
    print("| rows | work of the rows | assemble | plan | all, least of all |\n|---|---|---|---|---|")
    for num_rows in given.rows:
        steps = DecodeSteps(num_rows, given.steps)
        gc.collect()
        for _ in range(given.steps):
            steps.step()
        parts = [f"{statistics.median(each) * 1000:.3f}" for each in steps.seconds.values()]
        wholes = [sum(each) * 1000 for each in zip(*steps.seconds.values(), strict=True)]
        print(f"| {num_rows} | {' | '.join(parts)} | {statistics.median(wholes):.3f}, {min(wholes):.3f} |")


if __name__ == "__main__":
    main()
