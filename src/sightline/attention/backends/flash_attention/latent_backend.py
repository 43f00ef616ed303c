"""Latent attention with FlashAttention 4: expands every head's keys and values for all rows and attends ragged.

Never absorbs: the library has no kernel over entries on Hopper. Rows of one new token are correct but slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.backends.flash_attention.call import FlashAttention, RaggedKeys
from sightline.attention.backends.flash_attention.rows import LATENT_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    LatentInputs,
    Lse,
    StepView,
)
from sightline.attention.latent.phases import plan_phases
from sightline.attention.latent.varlen import ROOM_BYTES, LatentVarlen, VarlenPhases, never_absorbed
from sightline.attention.shared.tiles import row_spans
from sightline.attention.spec import LatentSpec
from sightline.core.errors import ConfigError
from sightline.kernels.triton.merge import merge_states
from sightline.kernels.triton.write import write_latents

_LARGEST_HEAD = 256
_HEAD_STEP = 8


@dataclass(frozen=True, eq=False)
class _RaggedCall:
    """Implements `VarlenCall`."""

    attend: FlashAttention
    query_offsets: Tensor
    """[num_rows + 1] int32."""
    key_offsets: Tensor
    causal: bool

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        keys = RaggedKeys(k, v, self.key_offsets)
        lse = self.attend(q, self.query_offsets, keys, out, causal=self.causal, needs_lse=True)
        assert lse is not None, "the LSE was asked for"
        return lse


@dataclass(frozen=True, eq=False)
class _RaggedKernel:
    """Implements `VarlenKernel`."""

    attend: FlashAttention

    def plan(
        self, name: str, query_lens: Sequence[int], key_lens: Sequence[int], *, causal: bool, buffers: PlanBuffers
    ) -> _RaggedCall:
        offsets = buffers.take(f"{name}.offsets", (2, len(query_lens) + 1), torch.int32)
        sums = [list(accumulate(lens, initial=0)) for lens in (query_lens, key_lens)]
        offsets.copy_(torch.tensor(sums, dtype=torch.int32), non_blocking=True)
        return _RaggedCall(self.attend, offsets[0], offsets[1], causal)


@dataclass(frozen=True, eq=False)
class _LatentPlan(AttentionPlan[LatentInputs]):
    entries: tuple[Tensor, ...]
    """Per layer: [num_slots, latent + rope]."""
    write_slots: Tensor | None
    """[num_tokens] int64; None under `TRANSIENT`."""
    phases: VarlenPhases
    needs_lse: bool

    def prepare(self) -> None:
        """Nothing to do: `plan` fills the buffers."""

    def run(self, layer: int, inputs: LatentInputs, out: Tensor) -> Lse | None:
        if self.write_slots is not None:
            write_latents(inputs.latent, inputs.k_rope, self.entries[layer], self.write_slots)
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device) if self.needs_lse else None
        self.phases.run(layer, inputs, out, lse)
        return lse


class FlashAttentionLatentBackend(AttentionBackend[LatentSpec, LatentInputs]):
    """Fast for rows of many new tokens on Hopper."""

    capabilities: ClassVar[tuple[Capability, ...]] = LATENT_ROWS
    room_bytes: ClassVar[int] = ROOM_BYTES
    """Memory for keys and values expanded from entries."""

    def __init__(self, context: BackendContext[LatentSpec]) -> None:
        spec = self._spec = context.spec
        for name, size in (("nope + rope", spec.nope_dim + spec.rope_dim), ("value", spec.value_dim)):
            if size % _HEAD_STEP or not 0 < size <= _LARGEST_HEAD:
                raise ConfigError(
                    f"expected {name} dimensions of a head in steps of {_HEAD_STEP} up to {_LARGEST_HEAD}, got {size}; "
                    "choose another attention backend"
                )
        self._pool = context.cache.pools["latent"]
        self._entries = self._pool.plane("entry").unbind(0)
        kernel = _RaggedKernel(FlashAttention(spec.scale))
        self._varlen = LatentVarlen(
            context,
            dict.fromkeys(context.limits.lanes, kernel),
            entry_scales=(1.0,) * len(self._entries),
            room_bytes=self.room_bytes,
            merge=merge_states,
        )

    def plan(self, step: StepView, buffers: PlanBuffers) -> _LatentPlan:
        phases = plan_phases(row_spans(step.batch, None), self._spec, self._varlen.room, never_absorbed)
        return _LatentPlan(
            entries=self._entries,
            write_slots=step.write_slots(self._pool),
            phases=self._varlen.plan(phases, step, buffers),
            needs_lse=step.needs_lse,
        )
