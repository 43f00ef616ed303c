"""What computes: the threads and kernels of the device, for operations and for products with dense weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from sightline.core.config import LayerKernels, Quantization
from sightline.core.device import DeviceKind
from sightline.core.ledger import Ledger
from sightline.core.resolution import ResolvedConfig
from sightline.kernels.chosen_slots import FindSlots, chosen_slots
from sightline.kernels.cpu.program import CpuLauncher, inline_launcher
from sightline.layers.linear import Linear
from sightline.layers.operations import Operations
from sightline.layers.torch_operations import TorchOperations
from sightline.runner.backend_choice import GroupSelection
from sightline.runner.quantised import has_cpu_kernels


def make_launcher(config: ResolvedConfig, selections: Sequence[GroupSelection], ledger: Ledger) -> CpuLauncher:
    """The threads that run compiled CPU kernels: as many as torch's, if anything is computed with such kernels."""
    chosen = [each.capability.package for selection in selections for each in selection.values()]
    keeps_codes = config.quantization is Quantization.KEEP and has_cpu_kernels()
    computes = config.layer_kernels is LayerKernels.NUMBA or LayerKernels.NUMBA.value in chosen or keeps_codes
    if config.device.kind is not DeviceKind.CPU or not computes:
        return inline_launcher()
    # Imported here: numba is an extra.
    from sightline.kernels.cpu.compiler import note_folder
    from sightline.kernels.cpu.team import Team

    note_folder(ledger)
    return CpuLauncher(Team(torch.get_num_threads()))


def make_operations(
    kernels: LayerKernels, device: torch.device, dtype: torch.dtype, launcher: CpuLauncher
) -> Operations:
    """The operations with the chosen kernels."""
    if kernels is LayerKernels.TORCH:
        return TorchOperations()
    # Imported here: a CPU install has no triton, and numba is an extra.
    if kernels is LayerKernels.NUMBA:
        # They get addresses, and would read those of a GPU's memory as their own.
        if device.type != "cpu":
            raise ValueError(f"expected the device cpu for kernels of a CPU, got {device}")
        from sightline.layers.cpu_operations import CpuOperations

        return CpuOperations(launcher, dtype)
    from sightline.kernels.triton.overlap import overlaps_on
    from sightline.layers.triton_operations import TritonOperations

    return TritonOperations(overlaps=overlaps_on(device))


def slots_finder(kernels: LayerKernels) -> FindSlots:
    """Returns the function that finds the slots of chosen entries."""
    if kernels is not LayerKernels.TRITON:
        return chosen_slots
    from sightline.kernels.triton.slots import find_slots

    return find_slots


def linear_maker(config: ResolvedConfig, launcher: CpuLauncher) -> Callable[[Tensor, Tensor | None], Linear]:
    """Returns the function that makes projections with dense weights for the chosen kernels."""
    if config.layer_kernels is LayerKernels.TORCH:
        return Linear
    if config.layer_kernels is LayerKernels.NUMBA:
        from sightline.layers.cpu_compute import CpuCompute
        from sightline.layers.cpu_linear import CpuLinear

        return partial(CpuLinear, compute=CpuCompute.on(launcher))
    from sightline.kernels.triton.overlap import overlaps_on
    from sightline.layers.thin_linear import ThinLinear

    return partial(ThinLinear, overlaps=overlaps_on(config.device.torch_device))
