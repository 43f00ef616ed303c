"""Latent attention with TRT-LLM's kernels for Blackwell, reached through FlashInfer.

Absorbed rows on its MLA decode kernel, one query per row; others on its kernel for ragged rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla
from torch import Tensor

from sightline.attention.backends.flashinfer.blackwell.memory import (
    GUARD_BYTES,
    WORKSPACE_BYTES,
    LaunchMemory,
    lease_launches,
    stats_bytes,
)
from sightline.attention.backends.flashinfer.blackwell.ragged import TrtllmRagged
from sightline.attention.backends.flashinfer.blackwell.rows import TRTLLM_LATENT_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import AttentionBackend, BackendContext, LatentInputs, StepView
from sightline.attention.latent.composed import ComposedLatent, ComposedLatentPlan, LatentKernels
from sightline.attention.latent.paged import CALL_TOKENS
from sightline.attention.latent.varlen import ROOM_BYTES
from sightline.attention.shared.page_rows import PageRows
from sightline.attention.spec import LatentSpec
from sightline.attention.workspace import Lane
from sightline.kernels.triton.project import project_real
from sightline.kernels.triton.write import write_latents


@dataclass(frozen=True, eq=False)
class _TrtllmEntries:
    """Implements `EntryKernel`."""

    spec: LatentSpec
    scratch: LaunchMemory

    def __call__(self, queries: Tensor, entries: Tensor, rows: PageRows, out: Tensor, lse: Tensor | None) -> None:
        count = queries.shape[0]
        step = count if lse is None else self._tokens_with_lse()
        for start in range(0, count, step):
            tokens = slice(start, min(start + step, count))
            part = None if lse is None else lse[tokens]
            self._launch(queries[tokens], entries, rows.part(tokens), out[tokens], part)

    def _tokens_with_lse(self) -> int:
        """Tokens whose statistics take at most half of the workspace."""
        per_token = stats_bytes(1, 1, self.spec.num_q_heads) - GUARD_BYTES
        return max(1, (len(self.scratch.workspace) // 2 - GUARD_BYTES) // per_token)

    def _launch(self, queries: Tensor, entries: Tensor, rows: PageRows, out: Tensor, lse: Tensor | None) -> None:
        spec = self.spec
        trtllm_batch_decode_with_kv_cache_mla(
            query=queries.unsqueeze(1),
            kv_cache=entries,
            workspace_buffer=self.scratch.workspace,
            qk_nope_head_dim=spec.nope_dim,
            kv_lora_rank=spec.latent_dim,
            qk_rope_head_dim=spec.rope_dim,
            block_tables=rows.pages,
            seq_lens=rows.lens,
            max_seq_len=rows.longest,
            out=out.unsqueeze(1),
            bmm1_scale=spec.scale,
            bmm2_scale=1.0,
            backend="trtllm-gen",
            lse=lse,
            return_lse=lse is not None,
            multi_ctas_kv_counter_buffer=self.scratch.counters,
            return_lse_base="basee",
        )


class TrtllmLatentBackend(AttentionBackend[LatentSpec, LatentInputs]):
    """TRT-LLM's latent attention for NVIDIA Blackwell, compute capabilities 10.0 and 10.3."""

    capabilities: ClassVar[tuple[Capability, ...]] = TRTLLM_LATENT_ROWS
    workspace_bytes: ClassVar[int] = WORKSPACE_BYTES
    room_bytes: ClassVar[int] = ROOM_BYTES
    """Memory for keys and values expanded from entries."""

    def __init__(self, context: BackendContext[LatentSpec]) -> None:
        spec, lanes = context.spec, context.limits.lanes

        def entries(lane: Lane) -> _TrtllmEntries:
            scratch = lease_launches(
                context,
                lane,
                "trtllm decode",
                num_bytes=self.workspace_bytes,
                num_queries=CALL_TOKENS,
                num_heads=spec.num_q_heads,
            )
            return _TrtllmEntries(spec, scratch)

        kernels = LatentKernels(
            entries={lane: entries(lane) for lane in lanes},
            ragged={lane: TrtllmRagged.leased(context, lane) for lane in lanes},
            write=write_latents,
            project=project_real,
        )
        self._composed = ComposedLatent(context, kernels, room_bytes=self.room_bytes)

    def plan(self, step: StepView, buffers: PlanBuffers) -> ComposedLatentPlan:
        return self._composed.plan(step, buffers)
