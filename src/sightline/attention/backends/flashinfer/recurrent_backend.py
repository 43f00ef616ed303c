"""The gated delta rule with FlashInfer's kernel for prompts, behind our own convolution.

    states    [heads, value_dim, key_dim] there, [heads, key_dim, value_dim] here: turned as they are copied
    decays    what is left of a state there, its natural logarithm here

Rows of one token are served by the same kernel, as segments of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from flashinfer.gdn_prefill import chunk_gated_delta_rule
from torch import Tensor

from sightline.attention.backends.flashinfer.rows import RECURRENT_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import AttentionBackend, BackendContext, RecurrentInputs, StepView
from sightline.attention.recurrent.waves import Borders, WaveInputs, WavePlan, WavePlanner
from sightline.attention.spec import RecurrentSpec


@dataclass(frozen=True)
class _GatedDelta:
    """Computes the segments of one group's layers."""

    scale: float

    def __call__(self, given: WaveInputs, borders: Borders, first: Tensor) -> tuple[Tensor, Tensor]:
        """See `SegmentKernel`; states are [segments, num_heads, value_dim, key_dim]."""
        behind = torch.empty_like(first)
        found, _ = chunk_gated_delta_rule(
            given.q,
            given.k,
            given.v,
            g=given.decay.exp().contiguous(),
            beta=given.beta.contiguous(),
            scale=self.scale,
            initial_state=first,
            output_final_state=True,
            cu_seqlens=borders.device,
            output_state=behind,
            max_seqlen=borders.longest,
        )
        return found, behind


class FlashInferRecurrentBackend(AttentionBackend[RecurrentSpec, RecurrentInputs]):
    """Runs on Hopper."""

    capabilities: ClassVar[tuple[Capability, ...]] = RECURRENT_ROWS

    def __init__(self, context: BackendContext[RecurrentSpec]) -> None:
        self._planner = WavePlanner(context, _GatedDelta(context.spec.scale), values_first=True)

    def plan(self, step: StepView, buffers: PlanBuffers) -> WavePlan:
        return self._planner.plan(step, buffers)
