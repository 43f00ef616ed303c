"""How a device's memory is shared out before an engine is built, and who took what once it is.

Pure arithmetic over what `core/device.py` reads. Does not know models, pools or backends.

    |------------------------------ total: the whole device ------------------------------|
    |-- allowed: memory_fraction of it (GPU) --------------------------------------|
    |-- held before --|-- weights --|-- reserve --|-- scratch --|-- room: the cache --|

The reserve is for captured graphs, for logits and drawing tokens from them, and for kernels and other temporaries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from sightline.core.device import DeviceKind, DeviceMemory

SCRATCH_SHARE = 8
"""Scratch memory may take 1 / SCRATCH_SHARE of what the weights leave; the cache is sized from the rest."""
RESERVE_SHARE = 50
LEAST_RESERVE = 1 << 30
"""On a GPU, 1 / RESERVE_SHARE of the card, and at least this, is kept for kernels and temporaries."""
SAMPLED_LOGITS = 1 << 22
"""Logits from which tokens are drawn at a time on a GPU."""
_BYTES_PER_SAMPLED_LOGIT = 80
_BYTES_PER_SAMPLED_ROW = 1 << 16
"""What drawing takes for each of them, and for each of their rows, at most: intermediate results of all operations."""
_UNKNOWN = DeviceMemory(0, 0, 0)


@dataclass(frozen=True)
class OutputMemory:
    """What outputs of the model take on a card at most, in bytes."""

    steps: int = 0
    """Logits of steps, and drawing tokens from them."""
    graphs: int = 0
    """Logits that captured graphs keep."""


_NO_OUTPUTS = OutputMemory()


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """What each part of an engine may take, in bytes, decided before anything is built."""

    start: DeviceMemory = _UNKNOWN
    """What the device had before."""
    allowed_bytes: int = 0
    """The most that the process may hold."""
    weight_bytes: int = 0
    kernel_bytes: int = 0
    """Reserved for kernels, libraries and temporaries."""
    output_bytes: int = 0
    """Reserved for the logits of steps, and for drawing tokens from them."""
    graph_bytes: int = 0
    """Reserved for what captured graphs keep."""
    scratch_bytes: int = 0
    room_bytes: int = 0
    """What is left for the cache; negative if not even the weights fit."""
    cache_bytes: int = 0
    """What the cache takes unless its size is asked for."""

    @property
    def reserve_bytes(self) -> int:
        """What is kept beside weights, scratch memory and cache."""
        return self.kernel_bytes + self.output_bytes + self.graph_bytes

    def without(self, num_bytes: int) -> MemoryBudget:
        """The budget with less memory for the cache."""
        return replace(self, room_bytes=self.room_bytes - num_bytes, cache_bytes=self.cache_bytes - num_bytes)

    def __str__(self) -> str:
        return (
            f"{gibibytes(self.start.free_bytes)} free of {gibibytes(self.start.total_bytes)}, of which the process may "
            f"hold {gibibytes(self.allowed_bytes)} and holds {gibibytes(self.start.held_bytes)}; weights "
            f"{gibibytes(self.weight_bytes)}, scratch {gibibytes(self.scratch_bytes)}, reserve "
            f"{gibibytes(self.reserve_bytes)}"
        )


def drawing_bytes(num_rows: int, vocab_size: int) -> int:
    """The most card memory that drawing tokens for `num_rows` rows takes; 0 without a vocabulary."""
    if not vocab_size:
        return 0
    rows_at_once = min(num_rows, max(1, SAMPLED_LOGITS // vocab_size))
    return rows_at_once * (vocab_size * _BYTES_PER_SAMPLED_LOGIT + _BYTES_PER_SAMPLED_ROW)


def share_out(
    kind: DeviceKind, start: DeviceMemory, fraction: float, weight_bytes: int, outputs: OutputMemory = _NO_OUTPUTS
) -> MemoryBudget:
    """Shares out a device's memory. A CPU keeps nothing for outputs.

    `fraction` is the share of a whole card that the process may hold. On a CPU, whose memory others use too, it is the
    share of what weights and scratch leave that the cache takes.
    """
    is_card = kind is DeviceKind.CUDA
    allowed = int(start.total_bytes * fraction) if is_card else start.total_bytes
    kernel_bytes = max(LEAST_RESERVE, start.total_bytes // RESERVE_SHARE) if is_card else 0
    outputs = outputs if is_card else _NO_OUTPUTS
    reserve = kernel_bytes + outputs.steps + outputs.graphs
    left = min(allowed - start.held_bytes, start.free_bytes) - weight_bytes - reserve
    scratch = max(0, left) // SCRATCH_SHARE
    room = left - scratch
    return MemoryBudget(
        start=start,
        allowed_bytes=allowed,
        weight_bytes=weight_bytes,
        kernel_bytes=kernel_bytes,
        output_bytes=outputs.steps,
        graph_bytes=outputs.graphs,
        scratch_bytes=scratch,
        room_bytes=room,
        cache_bytes=max(0, room) if is_card else int(max(0, room) * fraction),
    )


@dataclass(frozen=True)
class MemoryTaken:
    """What the parts of an engine take of a card, measured, in bytes."""

    weights: int
    cache: int
    scratch: int
    graphs: int
    host_cache: int = 0
    """What the host cache takes of the host's memory, not of the card."""
    host_entries: int = 0
    """What the entries of sparse layers take of the host's memory, if only hot ones are on the card (HiSparse)."""


@dataclass(frozen=True)
class MemoryLedger:
    """Who holds a card's memory once an engine is built, in bytes. The parts add up to what the driver calls used."""

    budget: MemoryBudget
    """What was reserved for each."""
    taken: MemoryTaken
    kernels: int
    """What was taken without torch: kernels, libraries and their work space."""
    other: int
    """The rest of what torch holds for the engine: work space of libraries, tables, rounding."""
    before: int
    """What was used before the engine was built: CUDA's context, other engines, other processes."""
    total: int
    """What the driver reports as used."""
    held: int
    """What the process holds, without CUDA's context."""

    @property
    def parts(self) -> Mapping[str, MemoryPart]:
        """What was reserved and what is held, by name. What is held adds up to `total`."""
        budget, taken = self.budget, self.taken
        return {
            "weights": MemoryPart(budget.weight_bytes, taken.weights),
            "cache": MemoryPart(budget.cache_bytes, taken.cache),
            "scratch": MemoryPart(budget.scratch_bytes, taken.scratch),
            "CUDA graphs": MemoryPart(budget.graph_bytes, taken.graphs),
            "logits, drawing, in steps": MemoryPart(budget.output_bytes, 0),
            "kernels, libraries": MemoryPart(budget.kernel_bytes, self.kernels),
            "other": MemoryPart(None, self.other),
            "before the start": MemoryPart(None, self.before),
        }

    def lines(self) -> list[str]:
        """A table for a person."""
        rows = [
            *[(name, _shown(part.reserved), gibibytes(part.held)) for name, part in self.parts.items()],
            ("used, by the driver", "", gibibytes(self.total)),
            ("held by the process", gibibytes(self.budget.allowed_bytes), gibibytes(self.held)),
        ]
        if self.taken.host_cache:
            rows.append(("host cache, pinned on the host", "", gibibytes(self.taken.host_cache)))
        if self.taken.host_entries:
            rows.append(("entries, pinned on the host", "", gibibytes(self.taken.host_entries)))
        heading = ("", "reserved", "held")
        return [f"memory: {name:<28}{reserved:>12}{held:>12}" for name, reserved, held in [heading, *rows]]


class MemoryPart(NamedTuple):
    """One line of a memory ledger, in bytes."""

    reserved: int | None
    """None if nothing was reserved for it."""
    held: int


def account(budget: MemoryBudget, now: DeviceMemory, taken: MemoryTaken) -> MemoryLedger:
    """Divides what is used `now` among those who took it."""
    start = budget.start
    before, total = start.total_bytes - start.free_bytes, now.total_bytes - now.free_bytes
    by_torch = now.held_bytes - start.held_bytes
    kernels = total - before - by_torch
    return MemoryLedger(
        budget=budget,
        taken=taken,
        kernels=kernels,
        other=by_torch - taken.weights - taken.cache - taken.scratch - taken.graphs,
        before=before,
        total=total,
        held=now.held_bytes + kernels,
    )


def _shown(num_bytes: int | None) -> str:
    return "" if num_bytes is None else gibibytes(num_bytes)


def gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
