"""TRT-LLM's kernel for ragged rows of latent attention, as a `VarlenKernel`.

Statistics take as much memory as if every row of a launch were as long as the longest, so rows of very different
lengths are launched in groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from flashinfer.prefill import trtllm_ragged_attention_deepseek
from torch import Tensor

from sightline.attention.backends.flashinfer.blackwell.memory import GUARD_BYTES, stats_bytes
from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import BackendContext
from sightline.attention.spec import LatentSpec
from sightline.attention.workspace import Lane

SHORT_ROWS = 64
"""Rows of at most `STATS_STEP` queries that fit one launch."""


class _Launch(NamedTuple):
    queries: slice
    keys: slice
    offsets: Tensor
    """[2, num_rows + 1] int32: prefix sums of query and key lengths within the launch."""
    key_lens: Tensor
    """[num_rows] int32."""
    longest_query: int
    longest_key: int


@dataclass(frozen=True, eq=False)
class _RaggedCall:
    """Implements `VarlenCall`."""

    scale: float
    workspace: Tensor
    launches: tuple[_Launch, ...]
    causal: bool

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for launch in self.launches:
            trtllm_ragged_attention_deepseek(
                query=q[launch.queries],
                key=k[launch.keys],
                value=v[launch.keys],
                workspace_buffer=self.workspace,
                seq_lens=launch.key_lens,
                max_q_len=launch.longest_query,
                max_kv_len=launch.longest_key,
                bmm1_scale=self.scale,
                bmm2_scale=1.0,
                o_sf_scale=1.0,
                batch_size=len(launch.key_lens),
                window_left=-1,
                cum_seq_lens_q=launch.offsets[0],
                cum_seq_lens_kv=launch.offsets[1],
                enable_pdl=None,
                is_causal=self.causal,
                return_lse=True,
                out=out[launch.queries],
                lse=lse[launch.queries],
            )
        # The library's log-sum-exp is to the base 2.
        return lse.mul_(math.log(2))


@dataclass(frozen=True, eq=False)
class TrtllmRagged:
    """Implements `VarlenKernel`."""

    scale: float
    workspace: Tensor
    """[num_bytes] uint8."""
    num_heads: int

    @staticmethod
    def leased(context: BackendContext[LatentSpec], lane: Lane) -> TrtllmRagged:
        """The kernel with memory for any step."""
        spec, tokens = context.spec, context.limits.max_step_tokens
        num_bytes = max(stats_bytes(1, tokens, spec.num_q_heads), stats_bytes(SHORT_ROWS, 1, spec.num_q_heads))
        workspace = context.workspace.lease(
            context.group, "trtllm ragged workspace", lane, (num_bytes + GUARD_BYTES,), torch.uint8, zeroed=True
        )
        return TrtllmRagged(spec.scale, workspace, spec.num_q_heads)

    def plan(
        self, name: str, query_lens: Sequence[int], key_lens: Sequence[int], *, causal: bool, buffers: PlanBuffers
    ) -> _RaggedCall:
        launches = []
        first_query = first_key = 0
        for index, rows in enumerate(self._groups(query_lens)):
            queries, keys = query_lens[rows], key_lens[rows]
            count = len(queries)
            staged = buffers.take(f"{name}.rows{index}", (3, count + 1), torch.int32)
            sums = [list(accumulate(lens, initial=0)) for lens in (queries, keys)]
            staged.copy_(torch.tensor([*sums, [*keys, 0]], dtype=torch.int32), non_blocking=True)
            launches.append(
                _Launch(
                    slice(first_query, first_query + sum(queries)),
                    slice(first_key, first_key + sum(keys)),
                    staged[:2],
                    staged[2, :count],
                    max(queries),
                    max(keys),
                )
            )
            first_query, first_key = launches[-1].queries.stop, launches[-1].keys.stop
        return _RaggedCall(self.scale, self.workspace, tuple(launches), causal)

    def _groups(self, query_lens: Sequence[int]) -> Iterator[slice]:
        """Runs of rows whose statistics fit the workspace. A single row always does."""
        start = 0
        for stop in range(1, len(query_lens) + 1):
            ends = stop == len(query_lens)
            if ends or not self._fits(query_lens[start : stop + 1]):
                yield slice(start, stop)
                start = stop

    def _fits(self, query_lens: Sequence[int]) -> bool:
        return stats_bytes(len(query_lens), max(query_lens), self.num_heads) + GUARD_BYTES <= len(self.workspace)
