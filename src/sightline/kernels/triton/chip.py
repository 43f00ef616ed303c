"""The properties of a device that decide how kernels split their work."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sightline.kernels.triton.overlap import overlaps_on


@dataclass(frozen=True)
class Chip:
    """Device properties that determine how work is split."""

    multiprocessors: int
    shared_bytes: int
    """Shared memory available to one program."""
    overlaps: bool

    @staticmethod
    def of(device: torch.device) -> Chip:
        """Properties of `device`; small placeholder values for the interpreter's CPU."""
        if device.type != "cuda":
            return Chip(multiprocessors=3, shared_bytes=1 << 17, overlaps=False)
        properties = torch.cuda.get_device_properties(device)
        return Chip(
            properties.multi_processor_count,
            properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
            overlaps_on(device),
        )
