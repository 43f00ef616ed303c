"""Indexers over compressed keys with Sightline's own Triton kernels: one launch that keeps, then scores and choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sightline.attention.backends.triton.choosing import Chooser, Choosing
from sightline.attention.backends.triton.compressed_tokens import entry_places, new_entries, rule_of, step_tokens
from sightline.attention.backends.triton.rows import COMPRESSED_INDEX_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.compressed.inputs import CompressedIndexInputs
from sightline.attention.compressed.spec import CompressedIndexSpec
from sightline.attention.contract import AttentionBackend, AttentionPlan, BackendContext, Lse, StepView
from sightline.attention.recurrent.planned_tokens import PlannedTokens
from sightline.kernels.triton.chip import Chip
from sightline.kernels.triton.choose import AT_ONCE
from sightline.kernels.triton.compressed_steps import CompressionRule, keep_tokens
from sightline.kernels.triton.compressed_tokens import CompressedTokens, EntryPages
from sightline.kernels.triton.index_scores import IndexKeys


@dataclass(frozen=True, eq=False)
class _TritonCompressedIndexPlan(AttentionPlan[CompressedIndexInputs]):
    rule: CompressionRule
    sums: tuple[Tensor, ...] | None
    """Per layer: [num_slots, num_sums, 3, head_dim] fp32; None under `TRANSIENT`."""
    keys: tuple[Tensor, ...]
    """Per layer: [num_slots, head_dim]; under `TRANSIENT`, those of the step."""
    planned: PlannedTokens
    tokens: CompressedTokens
    write_slots: Tensor | None
    """[num_tokens] int64; None under `TRANSIENT`."""
    places: EntryPages
    choosing: Choosing | None
    """None if nothing is chosen."""
    overlaps: bool

    def prepare(self) -> None:
        """Finds every token's row, and divides the queries into tiles, on the device."""
        self.planned.prepare()
        if self.choosing is not None:
            self.choosing.prepare()

    def run(self, layer: int, inputs: CompressedIndexInputs, out: Tensor) -> Lse | None:
        sums, keys = None if self.sums is None else self.sums[layer], self.keys[layer]
        new = new_entries(inputs.entries, sums, keys, self.write_slots)
        keep_tokens(self.tokens, self.rule, new, None, None, overlaps=self.overlaps)
        if self.choosing is not None:
            places, ratio = self.places, self.rule.ratio
            given = IndexKeys(keys, None, places.pages, places.in_page, ratio, places.apart)
            self.choosing.run(given, inputs.q, inputs.weights, out)
        return None


class TritonCompressedIndexBackend(AttentionBackend[CompressedIndexSpec, CompressedIndexInputs]):
    """Runs on NVIDIA GPUs."""

    capabilities: ClassVar[tuple[Capability, ...]] = COMPRESSED_INDEX_ROWS
    room_bytes: ClassVar[int] = 64 << 20
    """Memory for scores. What is chosen among takes 32 KiB a query in addition, if there are many keys."""
    at_once: ClassVar[int] = AT_ONCE
    """How many scores one program chooses from at once."""

    def __init__(self, context: BackendContext[CompressedIndexSpec]) -> None:
        spec, limits = context.spec, context.limits
        self._rule = rule_of(spec.compression)
        self._pool = context.cache.pools["index"]
        self._keys = self._pool.plane("key").unbind(0)
        self._sums = context.cache.states.plane("sums").unbind(0)
        self._overlaps = Chip.of(context.device).overlaps
        self._chooser = Chooser(context, self.room_bytes, self.at_once)
        shape, dtype = (limits.max_step_tokens, spec.head_dim), self._keys[0].dtype
        self._step_keys = {
            lane: context.workspace.lease(context.group, "triton step keys", lane, shape, dtype)
            for lane in limits.lanes
        }

    def plan(self, step: StepView, buffers: PlanBuffers) -> _TritonCompressedIndexPlan:
        planned, is_kept = PlannedTokens.of(step, buffers), step.states is not None
        return _TritonCompressedIndexPlan(
            rule=self._rule,
            sums=self._sums if is_kept else None,
            keys=self._keys if is_kept else (self._step_keys[step.lane],) * len(self._keys),
            planned=planned,
            tokens=step_tokens(step, planned),
            write_slots=step.write_slots(self._pool),
            places=entry_places(step, self._pool),
            choosing=self._chooser.plan(step, buffers) if step.is_sparse and step.batch.num_rows else None,
            overlaps=self._overlaps,
        )
