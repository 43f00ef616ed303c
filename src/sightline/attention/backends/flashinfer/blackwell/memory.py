"""Memory of TRT-LLM's kernels: what must begin as zeros, and how much a launch needs.

    counters     one semaphore per query and head. Zero at first; every launch leaves them at zero
    workspace    [statistics of queries, if an LSE is wanted | partial results of split contexts]

Older versions of the library keep the counters inside the workspace, so both are leased as zeros, and kernels of
different kinds do not share a workspace. Does not know the kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sightline.attention.backends.flashinfer.plans import streaming_multiprocessors
from sightline.attention.contract import BackendContext
from sightline.attention.workspace import Lane

WORKSPACE_BYTES = 128 << 20
"""The workspace size that the library recommends for kernels that split contexts."""
GUARD_BYTES = 1 << 20
"""Memory that a launch sets aside after the statistics."""
STATS_BYTES = 8
"""A maximum and a sum per query and head, in fp32."""
STATS_STEP = 256
"""Statistics are laid out as if every row had as many queries as the longest, rounded up to this many."""


class LaunchMemory(NamedTuple):
    """The memory of one lane's launches of one kind of kernel."""

    workspace: Tensor
    """[num_bytes] uint8."""
    counters: Tensor
    """[num_semaphores] int32."""


def lease_launches(
    context: BackendContext[Any], lane: Lane, name: str, *, num_bytes: int, num_queries: int, num_heads: int
) -> LaunchMemory:
    """Memory for launches of at most `num_queries` rows."""
    semaphores = max(num_queries * num_heads, streaming_multiprocessors(context.device))

    def lease(part: str, size: int, dtype: torch.dtype) -> Tensor:
        return context.workspace.lease(context.group, f"{name} {part}", lane, (size,), dtype, zeroed=True)

    return LaunchMemory(
        lease("workspace", num_bytes, torch.uint8), lease("counters", -(-semaphores // 8) * 8, torch.int32)
    )


def stats_bytes(num_rows: int, longest_query: int, num_heads: int) -> int:
    """Returns the memory that a launch sets aside for statistics if it returns an LSE."""
    per_row = -(-longest_query // STATS_STEP) * STATS_STEP
    return STATS_BYTES * num_heads * num_rows * per_row + GUARD_BYTES
