"""Latent attention with CuteDSL's MLA decode kernel for Blackwell, reached through FlashInfer.

Absorbed rows on that kernel, one query per row; others on TRT-LLM's kernel for ragged rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla
from torch import Tensor

from sightline.attention.backends.flashinfer.blackwell.memory import WORKSPACE_BYTES
from sightline.attention.backends.flashinfer.blackwell.ragged import TrtllmRagged
from sightline.attention.backends.flashinfer.blackwell.rows import CUTEDSL_LATENT_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import AttentionBackend, BackendContext, LatentInputs, StepView
from sightline.attention.latent.composed import ComposedLatent, ComposedLatentPlan, LatentKernels
from sightline.attention.latent.varlen import ROOM_BYTES
from sightline.attention.shared.page_rows import PageRows
from sightline.attention.spec import LatentSpec
from sightline.kernels.triton.project import project_real
from sightline.kernels.triton.write import write_latents


@dataclass(frozen=True, eq=False)
class _CuteDslEntries:
    """Implements `EntryKernel`."""

    spec: LatentSpec
    workspace: Tensor
    """[num_bytes] uint8."""

    def __call__(self, queries: Tensor, entries: Tensor, rows: PageRows, out: Tensor, lse: Tensor | None) -> None:
        spec = self.spec
        trtllm_batch_decode_with_kv_cache_mla(
            query=queries.unsqueeze(1),
            kv_cache=entries,
            workspace_buffer=self.workspace,
            qk_nope_head_dim=spec.nope_dim,
            kv_lora_rank=spec.latent_dim,
            qk_rope_head_dim=spec.rope_dim,
            block_tables=rows.pages,
            seq_lens=rows.lens,
            max_seq_len=rows.longest,
            out=out.unsqueeze(1),
            bmm1_scale=spec.scale,
            bmm2_scale=1.0,
            backend="cute-dsl",
            lse=lse,
            return_lse=lse is not None,
            # The other implementation has no log-sum-exp.
            cute_dsl_impl="monolithic",
            return_lse_base="basee",
        )


class CuteDslLatentBackend(AttentionBackend[LatentSpec, LatentInputs]):
    """CuteDSL's latent attention for NVIDIA Blackwell, compute capabilities 10.0 and 10.3."""

    capabilities: ClassVar[tuple[Capability, ...]] = CUTEDSL_LATENT_ROWS
    workspace_bytes: ClassVar[int] = WORKSPACE_BYTES
    room_bytes: ClassVar[int] = ROOM_BYTES
    """Memory for keys and values expanded from entries."""

    def __init__(self, context: BackendContext[LatentSpec]) -> None:
        lanes, size = context.limits.lanes, (self.workspace_bytes,)
        workspaces = {
            lane: context.workspace.lease(context.group, "cutedsl workspace", lane, size, torch.uint8, zeroed=True)
            for lane in lanes
        }
        kernels = LatentKernels(
            entries={lane: _CuteDslEntries(context.spec, workspaces[lane]) for lane in lanes},
            ragged={lane: TrtllmRagged.leased(context, lane) for lane in lanes},
            write=write_latents,
            project=project_real,
        )
        self._composed = ComposedLatent(context, kernels, room_bytes=self.room_bytes)

    def plan(self, step: StepView, buffers: PlanBuffers) -> ComposedLatentPlan:
        return self._composed.plan(step, buffers)
