"""Steps of a few fixed shapes that are captured once and then replayed, and the choice of the shape for a step.

    work ─ fits a bucket? ─ no ──▶ Batch in memory of its own ─ plan ─ certificate ─ eager forward
                  │
                  └─ yes ──▶ Batch.inside the bucket, padded, one copy ─ the same plan, into the bucket's plan buffers
                             ─ the same certificate ─ replay

A bucket is the memory of the inputs of one shape. Its plan buffers belong to the planner, its recording to the runner.
Does not know models or what a replay is made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sightline.attention.bindings import GroupBinding
from sightline.attention.capability import Capability, GraphLevel, Work, decode_work
from sightline.attention.planner import Planner
from sightline.cache.store import CacheStore, NetworkCache
from sightline.core.batch import Batch, RowWork, StepWork
from sightline.core.batch_memory import StaticMemory, StepShape
from sightline.core.errors import ConfigError
from sightline.core.ledger import Ledger
from sightline.core.staging import StagingRing
from sightline.core.step_size import StepSize
from sightline.runner.progress import BuildPhase, BuildStep, OnBuildStep
from sightline.runner.recording import Recorder, UnrecordableError
from sightline.runner.replicas import Beside
from sightline.runner.runner import Runner

MAX_NEW_TOKENS = 8
"""Most new tokens of a row in a captured step that is not decode."""


class Graphs:
    """The buckets of an engine; none if its steps are all eager."""

    def __init__(
        self,
        sizes: Sequence[int],
        store: CacheStore,
        cache: NetworkCache,
        planner: Planner,
        bindings: Sequence[GroupBinding],
    ) -> None:
        """`sizes` are numbers of tokens, and so of rows; `cache` is the network's, in the store."""
        self._decoded = tuple(size for size in sizes if size <= store.limits.max_rows)
        """Numbers of rows that may decode."""
        self._store = store
        self._sources = cache.sources
        self._planner = planner
        self._bindings = tuple(bindings)
        # Decode first, then by size: the first that fits is the best.
        rows = [{work: part.capability for work, part in each.serving.items()} for each in bindings]
        shapes = captured_shapes(sizes, self._decoded, rows)
        self.buckets = _make_buckets(shapes, cache.num_slot_columns, store.device) if shapes else ()
        for bucket in self.buckets:
            planner.reserve(bucket)
        self.num_bytes = 0
        """Device memory that the graphs keep, beyond what eager steps have."""

    def assemble(
        self, work: StepWork, chosen: Tensor | None = None, *, awaited: int = 0, size: StepSize | None = None
    ) -> Batch:
        """A batch of paged rows: in the first bucket that it fits, otherwise in memory of its own.

        `chosen` are the tokens that steps in flight choose, if rows continue some; `awaited` is the number of tokens
        that the step before will choose, if it is not launched yet. `size` is one that the replicas agreed on: the
        batch is padded to it.
        """
        bucket = self.bucket_for(StepSize.of(work) if size is None else size) if self.buckets else None
        if bucket is not None:
            return Batch.inside(work, self._sources, bucket, chosen, awaited)
        batch = Batch(work, self._sources, self._store.device, chosen, awaited)
        return batch if size is None else batch.pad(size.num_rows, size.num_tokens)

    def assemble_as(self, work: StepWork, shape: StepShape | None, num_rows: int, num_tokens: int) -> Batch:
        """The batch of a step for which another process chose the bucket, or the size with padding. Raises `KeyError`
        if there is no bucket of that shape."""
        if shape is None:
            return Batch(work, self._sources, self._store.device).pad(num_rows, num_tokens)
        return Batch.inside(work, self._sources, {bucket.shape: bucket for bucket in self.buckets}[shape])

    def assemble_beside(
        self, work: StepWork, network: NetworkCache, chosen: Tensor | None = None, size: StepSize | None = None
    ) -> Beside:
        """The step of another replica, padded as its ranks pad it; see `assemble`. `network` is its account of rows."""
        size = StepSize.of(work) if size is None else size
        bucket = self.bucket_for(size)
        shape = None if bucket is None else bucket.shape
        batch = Batch(work, network.sources, self._store.device, chosen)
        return Beside(batch.pad(*size.padded(shape)), shape)

    def bucket_for(self, size: StepSize) -> StaticMemory | None:
        """The first bucket that a step of this size fits; None for a step without rows."""
        if not size.num_rows or size.longest > MAX_NEW_TOKENS or not size.is_causal:
            return None
        for bucket in self.buckets:
            # A row without new tokens is a row all the same.
            fits = max(size.num_tokens, size.num_rows) <= bucket.shape.size
            if fits and size.longest <= bucket.shape.query_bound:
                return bucket
        return None

    def capture(self, runner: Runner, recorder: Recorder, ledger: Ledger, on_step: OnBuildStep) -> None:
        """Captures every bucket, the largest first, so that the others reuse its memory. No row may be open yet.

        Buckets whose steps cannot be recorded are given up, and the ledger is told.
        """
        self._tell_uncaptured(ledger, is_essential=recorder.is_essential)
        order = sorted(self.buckets, key=lambda bucket: bucket.shape.size, reverse=True)
        refused = dict[StaticMemory, str]()
        for done, bucket in enumerate(order):
            on_step(BuildStep(BuildPhase.GRAPHS, str(bucket.shape), done, len(order)))
            try:
                self._capture(bucket, runner, recorder)
            except UnrecordableError as error:
                refused[bucket] = str(error)
        on_step(BuildStep(BuildPhase.GRAPHS, "", len(order), len(order)))
        self.buckets = tuple(bucket for bucket in self.buckets if bucket not in refused)
        self.num_bytes = recorder.num_bytes
        if refused:
            sizes = ", ".join(str(bucket.shape.size) for bucket in self.buckets or ()) or "no number of"
            ledger.note(
                "cuda_graph_sizes",
                f"decode steps of {sizes} rows are recorded; the others run eagerly, with the same results, because "
                f"they need {', '.join(sorted(set(refused.values())))}, which only torch computes",
            )

    def _capture(self, bucket: StaticMemory, runner: Runner, recorder: Recorder) -> None:
        """Plans a step without padding once, and records it."""
        store, rows = self._store, list[int]()
        try:
            size, work = bucket.shape.size, list[RowWork]()
            for count in _shared_out(size, min(size, store.limits.max_rows)):
                rows.append(store.open_row())
                store.grow_row(rows[-1], count)
                work.append(RowWork(rows[-1], [0] * count, context_len=0, num_logits=count))
            planned = self._planner.plan(Batch.inside(StepWork.of(work), self._sources, bucket))
            runner.capture(planned, recorder)
        except RuntimeError as error:
            raise ConfigError(
                f"expected a step of {bucket.shape} that can be captured in a CUDA graph, got: {error}; use "
                "enforce_eager, or fewer cuda_graph_sizes if memory is short"
            ) from error
        finally:
            # In the order in which they were free before.
            for row in reversed(rows):
                store.close_row(row)

    def _tell_uncaptured(self, ledger: Ledger, *, is_essential: bool) -> None:
        decoded = {bucket.shape.size for bucket in self.buckets if bucket.shape.query_bound == 1}
        for binding in self._bindings:
            eager = dict[str, list[int]]()
            for size in self._decoded:
                part = binding.serving[decode_work(size)]
                if size not in decoded and part.capability.graph is GraphLevel.NONE:
                    eager.setdefault(type(part.backend).__name__, []).append(size)
            for backend, sizes in eager.items():
                outcome = (
                    f"steps of {', '.join(map(str, sizes))} rows run eagerly: {backend}, which serves "
                    f"{binding.group.name}, cannot be captured"
                )
                if is_essential:
                    remedy = "choose another decode_attention_backend, or enforce_eager"
                    ledger.degrade("cuda_graph_sizes", outcome, remedy)
                else:
                    ledger.note("cuda_graph_sizes", outcome)


def _shared_out(num_tokens: int, num_rows: int) -> list[int]:
    """Tokens of each row, as equal as may be."""
    return [num_tokens // num_rows + (row < num_tokens % num_rows) for row in range(num_rows)]


def _make_buckets(shapes: Sequence[StepShape], num_slot_columns: int, device: torch.device) -> tuple[StaticMemory, ...]:
    """A bucket for each shape. All are filled from one ring."""
    ring = StagingRing.of(max([StaticMemory.num_numbers(shape, num_slot_columns) for shape in shapes]), device)
    return tuple(StaticMemory(shape, num_slot_columns, device, ring) for shape in shapes)


def captured_shapes(
    sizes: Sequence[int], decoded: Sequence[int], rows: Sequence[Mapping[Work, Capability]]
) -> list[StepShape]:
    """The steps that can be captured with the backends of every group, decode first, then by size.

    `sizes` are numbers of tokens, `decoded` those that may also be numbers of decode rows, and `rows` the capability
    rows that serve each group.
    """

    def is_captured(size: int) -> bool:
        return all(each[decode_work(size)].graph is not GraphLevel.NONE for each in rows)

    shapes = [StepShape(size, 1) for size in decoded if is_captured(size)]
    # Steps of a few new tokens a row, where the backends that serve any rows can be captured with any.
    if all(each[Work.PREFILL].graph is GraphLevel.FULL for each in rows):
        shapes += [StepShape(size, min(size, MAX_NEW_TOKENS)) for size in sizes if size > 1]
    return shapes
