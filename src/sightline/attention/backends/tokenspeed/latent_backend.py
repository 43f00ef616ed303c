"""Latent attention with TokenSpeed's MLA decode kernel for Blackwell.

Absorbed rows on that kernel, one query per row; others on Sightline's own Triton kernel for ragged rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

# Not from the package itself, which replaces a function that it cannot import by one that raises when it is called.
from tokenspeed_mla.mla_decode import tokenspeed_mla_decode
from torch import Tensor

from sightline.attention.backends.tokenspeed.rows import LATENT_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import AttentionBackend, BackendContext, LatentInputs, StepView
from sightline.attention.latent.composed import ComposedLatent, ComposedLatentPlan, LatentKernels
from sightline.attention.latent.extend import ExtendKernel
from sightline.attention.latent.varlen import ROOM_BYTES
from sightline.attention.shared.page_rows import PageRows
from sightline.attention.spec import LatentSpec
from sightline.kernels.triton.chip import Chip
from sightline.kernels.triton.project import project_real
from sightline.kernels.triton.write import write_latents

QUERY_TILE = 128
"""Heads of a query, padded: the rows of a partial result."""


@dataclass(frozen=True, eq=False)
class _TokenSpeedEntries:
    """Implements `EntryKernel`."""

    spec: LatentSpec
    workspace: Tensor
    """[num_bytes] int8."""

    def __call__(self, queries: Tensor, entries: Tensor, rows: PageRows, out: Tensor, lse: Tensor | None) -> None:
        spec = self.spec
        found = tokenspeed_mla_decode(
            query=queries.unsqueeze(1),
            kv_cache=entries,
            workspace_buffer=self.workspace,
            kv_lora_rank=spec.latent_dim,
            qk_rope_head_dim=spec.rope_dim,
            block_tables=rows.pages,
            seq_lens=rows.lens,
            max_seq_len=rows.longest,
            softmax_scale=spec.scale,
            out=out.unsqueeze(1),
            return_lse=lse is not None,
        )
        if lse is not None:
            # The library's log-sum-exp is to the base 2.
            torch.mul(found[1].squeeze(1), math.log(2), out=lse)


class TokenSpeedLatentBackend(AttentionBackend[LatentSpec, LatentInputs]):
    """TokenSpeed's latent attention for NVIDIA Blackwell, compute capabilities 10.0 and 10.3."""

    capabilities: ClassVar[tuple[Capability, ...]] = LATENT_ROWS
    room_bytes: ClassVar[int] = ROOM_BYTES
    """Memory for keys and values expanded from entries."""

    def __init__(self, context: BackendContext[LatentSpec]) -> None:
        spec, lanes, chip = context.spec, context.limits.lanes, Chip.of(context.device)
        # A context is split only among multiprocessors that have no query of their own, two to a split; a split keeps
        # a vector and a number per head.
        size = (chip.multiprocessors * QUERY_TILE * (spec.latent_dim + 1) * 4,)
        workspaces = {
            lane: context.workspace.lease(context.group, "tokenspeed workspace", lane, size, torch.int8, zeroed=True)
            for lane in lanes
        }
        ragged = ExtendKernel(spec, context.dtype, chip.shared_bytes)
        kernels = LatentKernels(
            entries={lane: _TokenSpeedEntries(spec, workspaces[lane]) for lane in lanes},
            ragged=dict.fromkeys(lanes, ragged),
            write=write_latents,
            project=project_real,
        )
        self._composed = ComposedLatent(context, kernels, room_bytes=self.room_bytes)

    def plan(self, step: StepView, buffers: PlanBuffers) -> ComposedLatentPlan:
        return self._composed.plan(step, buffers)
