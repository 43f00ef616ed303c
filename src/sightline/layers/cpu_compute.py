"""What all CPU kernels of a model's weights share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sightline.kernels.coded_weights import CodedWeights, join
from sightline.kernels.cpu.compiler import CompiledKernel
from sightline.kernels.cpu.panels import PackedMatrix, pack
from sightline.kernels.cpu.processor import Processor
from sightline.kernels.cpu.record import Launcher, Record
from sightline.kernels.cpu.vector_unit import UNITS

_ROOM_BYTES = 4 << 20
_ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class CpuCompute:
    """What all projections of a model share: who runs their records, the processor, and memory for rounded inputs.

    One step uses it at a time.
    """

    launcher: Launcher
    processor: Processor
    room: Tensor
    """uint8, aligned. Holds the rounded inputs between two records of a projection."""

    @classmethod
    def on(cls, launcher: Launcher, processor: Processor | None = None, room_bytes: int = _ROOM_BYTES) -> CpuCompute:
        """Uses kernels for `processor`, by default this machine's. The room must hold a row of every product."""
        memory = torch.zeros(room_bytes + _ALIGNMENT, dtype=torch.uint8)
        start = -memory.data_ptr() % _ALIGNMENT
        return cls(launcher, processor or Processor.detect(), memory[start : start + room_bytes])

    def pack(self, parts: Sequence[CodedWeights]) -> list[PackedMatrix]:
        """Packs weights for this processor. Neighbours of the same form become one matrix."""
        unit = UNITS[self.processor.instructions]
        return [pack(part, unit.panel, unit.quads_together) for part in join(parts)]


def record_of(kernel: CompiledKernel, arguments: tuple[int, ...], keeps: tuple[object, ...]) -> Record:
    """A call of the kernel."""
    return Record(kernel.address, np.array(arguments, dtype=np.int64), (kernel, *keeps), kernel.name)
