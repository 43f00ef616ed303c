"""Plan buffers without a planner."""

from __future__ import annotations

import torch

from sightline.attention.buffers import PlanBuffers, PlanMemory
from sightline.attention.workspace import MAIN_LANE, Workspace

CPU = torch.device("cpu")


def plan_memory(limit_bytes: int = 1 << 30, *, poison: bool = False) -> PlanMemory:
    lease = Workspace(CPU, limit_bytes).elastic("planner", "plan buffers", MAIN_LANE)
    return PlanMemory(lease, poison=poison)


def plan_buffers(*, poison: bool = False) -> PlanBuffers:
    """Those of one plan."""
    return plan_memory(poison=poison).part("group0[0]")
