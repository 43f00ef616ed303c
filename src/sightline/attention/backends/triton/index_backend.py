"""Indexers with Sightline's own Triton kernels: one launch that writes keys, then scores and choices part by part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from sightline.attention.backends.triton.choosing import Chooser, Choosing
from sightline.attention.backends.triton.rows import INDEX_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import AttentionBackend, AttentionPlan, BackendContext, IndexInputs, Lse, StepView
from sightline.attention.spec import IndexSpec
from sightline.cache.pools import Pool
from sightline.cache.spec import SCALED_DTYPES
from sightline.kernels.triton.chip import Chip
from sightline.kernels.triton.choose import AT_ONCE
from sightline.kernels.triton.index_scores import IndexKeys, write_index_keys


@dataclass(frozen=True, eq=False)
class _TritonIndexPlan(AttentionPlan[IndexInputs]):
    layers: tuple[IndexKeys, ...]
    write_slots: Tensor | None
    """[num_tokens] int64; None under `TRANSIENT`, which reads the step's own keys."""
    choosing: Choosing | None
    """None if nothing is chosen."""
    overlaps: bool
    """True if launches may begin before the previous one ends."""

    def prepare(self) -> None:
        """Divides the queries into tiles, on the device."""
        if self.choosing is not None:
            self.choosing.prepare()

    def run(self, layer: int, inputs: IndexInputs, out: Tensor) -> Lse | None:
        keys = self.layers[layer]
        if self.write_slots is None:
            keys = IndexKeys(inputs.key, None, None, 1)
        else:
            write_index_keys(inputs.key, keys.codes, keys.scales, self.write_slots, overlaps=self.overlaps)
        if self.choosing is not None:
            self.choosing.run(keys, inputs.q, inputs.weights, out)
        return None


class TritonIndexBackend(AttentionBackend[IndexSpec, IndexInputs]):
    """Runs on NVIDIA GPUs."""

    capabilities: ClassVar[tuple[Capability, ...]] = INDEX_ROWS
    room_bytes: ClassVar[int] = 64 << 20
    """Memory for scores. What is chosen among takes 32 KiB a query in addition, if there are many keys."""
    at_once: ClassVar[int] = AT_ONCE
    """How many scores one program chooses from at once."""

    def __init__(self, context: BackendContext[IndexSpec]) -> None:
        self._pool = context.cache.pools["index"]
        self._layers = _layers(self._pool)
        self._chooser = Chooser(context, self.room_bytes, self.at_once)
        self._overlaps = Chip.of(context.device).overlaps

    def plan(self, step: StepView, buffers: PlanBuffers) -> _TritonIndexPlan:
        return _TritonIndexPlan(
            self._layers,
            step.write_slots(self._pool),
            self._chooser.plan(step, buffers) if step.is_sparse and step.batch.num_rows else None,
            self._overlaps,
        )


def _layers(pool: Pool) -> tuple[IndexKeys, ...]:
    keys = IndexKeys(pool.plane("key")[0], None, pool.table.pages, pool.page_size)
    scales = pool.plane("scale") if pool.plane("key").dtype in SCALED_DTYPES else [None] * pool.spec.num_layers
    return tuple(
        replace(keys, codes=codes, scales=scale) for codes, scale in zip(pool.plane("key"), scales, strict=True)
    )
