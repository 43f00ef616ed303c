"""How a device's memory is shared out before an engine is built, and who took what once it is.

Pure arithmetic over what `core/device.py` reads. Does not know models, pools or backends.

    |------------------------------ total: the whole device ------------------------------|
    |-- allowed: memory_fraction of it (GPU) --------------------------------------|
    |-- held before --|-- weights --|-- reserve --|-- scratch --|-- room: the cache --|
"""

from __future__ import annotations

from dataclasses import dataclass

from sightline.core.device import DeviceKind, DeviceMemory

SCRATCH_SHARE = 8
"""Scratch memory may take 1 / SCRATCH_SHARE of what the weights leave; the cache is sized from the rest."""
RESERVE_SHARE = 50
LEAST_RESERVE = 1 << 30
"""On a GPU, 1 / RESERVE_SHARE of the card, and at least this, is kept for kernels and temporaries, besides logits."""
_UNKNOWN = DeviceMemory(0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """What each part of an engine may take, in bytes, decided before anything is built."""

    start: DeviceMemory = _UNKNOWN
    """What the device had before."""
    allowed_bytes: int = 0
    """The most that the process may hold."""
    weight_bytes: int = 0
    reserve_bytes: int = 0
    scratch_bytes: int = 0
    room_bytes: int = 0
    """What is left for the cache; negative if not even the weights fit."""
    cache_bytes: int = 0
    """What the cache takes unless its size is asked for."""

    def __str__(self) -> str:
        return (
            f"{gibibytes(self.start.free_bytes)} free of {gibibytes(self.start.total_bytes)}, of which the process may "
            f"hold {gibibytes(self.allowed_bytes)} and holds {gibibytes(self.start.held_bytes)}; weights "
            f"{gibibytes(self.weight_bytes)}, scratch {gibibytes(self.scratch_bytes)}, reserve "
            f"{gibibytes(self.reserve_bytes)}"
        )


def share_out(
    kind: DeviceKind, start: DeviceMemory, fraction: float, weight_bytes: int, output_bytes: int = 0
) -> MemoryBudget:
    """Shares out a device's memory. `output_bytes` is what logits take on a card, those of captured graphs included.

    `fraction` is the share of a whole card that the process may hold. On a CPU, whose memory others use too, it is the
    share of what weights and scratch leave that the cache takes.
    """
    is_card = kind is DeviceKind.CUDA
    allowed = int(start.total_bytes * fraction) if is_card else start.total_bytes
    reserve = max(LEAST_RESERVE, start.total_bytes // RESERVE_SHARE) + output_bytes if is_card else 0
    left = min(allowed - start.held_bytes, start.free_bytes) - weight_bytes - reserve
    scratch = max(0, left) // SCRATCH_SHARE
    room = left - scratch
    return MemoryBudget(
        start=start,
        allowed_bytes=allowed,
        weight_bytes=weight_bytes,
        reserve_bytes=reserve,
        scratch_bytes=scratch,
        room_bytes=room,
        cache_bytes=max(0, room) if is_card else int(max(0, room) * fraction),
    )


@dataclass(frozen=True)
class MemoryLedger:
    """Who holds a card's memory once an engine is built, in bytes. The parts add up to what the driver calls used."""

    weights: int
    cache: int
    scratch: int
    kernels: int
    """What was taken without torch: kernels, libraries and their work space."""
    other: int
    """The rest of what torch holds for the engine: graphs, tables, rounding."""
    before: int
    """What was used before the engine was built: CUDA's context, other engines, other processes."""
    total: int
    """What the driver reports as used."""
    allowed: int
    """The most that the process may hold."""
    held: int
    """What the process holds, without CUDA's context."""

    def lines(self) -> list[str]:
        """A table for a person."""
        parts = {
            "weights": self.weights,
            "cache": self.cache,
            "scratch": self.scratch,
            "kernels, libraries": self.kernels,
            "graphs, other": self.other,
            "before the start": self.before,
            "used, by the driver": self.total,
            "held, of at most " + gibibytes(self.allowed): self.held,
        }
        return [f"memory: {name:<28}{gibibytes(num_bytes):>12}" for name, num_bytes in parts.items()]


def account(budget: MemoryBudget, now: DeviceMemory, cache_bytes: int, scratch_bytes: int) -> MemoryLedger:
    """Divides what is used `now` among those who took it."""
    start = budget.start
    before, total = start.total_bytes - start.free_bytes, now.total_bytes - now.free_bytes
    by_torch = now.held_bytes - start.held_bytes
    kernels = total - before - by_torch
    return MemoryLedger(
        weights=budget.weight_bytes,
        cache=cache_bytes,
        scratch=scratch_bytes,
        kernels=kernels,
        other=by_torch - budget.weight_bytes - cache_bytes - scratch_bytes,
        before=before,
        total=total,
        allowed=budget.allowed_bytes,
        held=now.held_bytes + kernels,
    )


def gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
