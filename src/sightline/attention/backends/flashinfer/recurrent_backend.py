"""The gated delta rule with FlashInfer's kernel for prompts, behind our own convolution.

    states    [heads, value_dim, key_dim] there, [heads, key_dim, value_dim] here: turned as they are copied
    decays    what is left of a state there, its natural logarithm here
    tensors   contiguous and at addresses of whole 16 bytes there, with any strides here
    tiles     of 64 tokens there, from the beginning of each segment: keys and values behind its end are read, and
              multiplied by 0

Rows of one token are served by the same kernel, as segments of a chunk. The last tile of a wave ends with its tokens:
what lies behind them is not read.
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
from sightline.attention.recurrent.waves import Borders, WaveInputs, WavePlan, WavePlanner, aligned
from sightline.attention.spec import RecurrentSpec


@dataclass(frozen=True)
class _GatedDelta:
    """Computes the segments of one group's layers."""

    scale: float

    def __call__(self, given: WaveInputs, borders: Borders, first: Tensor) -> tuple[Tensor, Tensor]:
        """See `SegmentKernel`; states are [segments, num_heads, value_dim, key_dim]."""
        behind = torch.empty_like(first)
        left = torch.exp(given.decay, out=torch.empty(given.beta.shape, dtype=torch.float32, device=first.device))
        found, _ = chunk_gated_delta_rule(
            given.q,
            given.k,
            given.v,
            g=left,
            beta=aligned(given.beta),
            scale=self.scale,
            initial_state=first,
            output_final_state=True,
            cu_seqlens=borders.device,
            output=given.place,
            output_state=behind,
            max_seqlen=borders.longest,
        )
        return found, behind


class FlashInferRecurrentBackend(AttentionBackend[RecurrentSpec, RecurrentInputs]):
    """Runs on Hopper."""

    capabilities: ClassVar[tuple[Capability, ...]] = RECURRENT_ROWS

    def __init__(self, context: BackendContext[RecurrentSpec]) -> None:
        kernel = _GatedDelta(context.spec.scale)
        self._planner = WavePlanner(context, kernel, values_first=True, reads_beyond=True)

    def plan(self, step: StepView, buffers: PlanBuffers) -> WavePlan:
        return self._planner.plan(step, buffers)
