"""The memory ledger of an engine on a card: read from the device once the engine is built."""

from __future__ import annotations

from sightline.core.device import DeviceKind, device_memory
from sightline.core.ledger import Ledger
from sightline.core.memory import MemoryLedger, MemoryTaken, account, gibibytes
from sightline.core.resolution import ResolvedConfig


def memory_ledger(config: ResolvedConfig, taken: MemoryTaken) -> MemoryLedger | None:
    """Who holds the card's memory; None on a CPU, or if the engine was not sized from what the device reports."""
    if config.device.kind is not DeviceKind.CUDA or not config.memory.allowed_bytes:
        return None
    return account(config.memory, device_memory(config.device), taken)


def tell_excess(config: ResolvedConfig, taken: MemoryTaken, ledger: Ledger) -> None:
    """Records it if the process holds more of the card than it may."""
    memory = memory_ledger(config, taken)
    if memory is not None and memory.held > config.memory.allowed_bytes:
        ledger.degrade(
            "memory_fraction",
            f"the process holds {gibibytes(memory.held)} of the card, more than its "
            f"{gibibytes(config.memory.allowed_bytes)}",
            "lower memory_fraction or cache_tokens",
        )
