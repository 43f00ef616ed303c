"""Every way in which weights stay quantised on a CPU. Each is correct on every CPU, and fast on its own."""

from __future__ import annotations

from sightline.kernels.block_product import CpuFeatures
from sightline.kernels.cpu.processor import Processor
from sightline.layers.cpu_compute import CpuCompute
from sightline.models.kept_codes import KeptCodes
from sightline.models.kept_weights import KeptBlocks, KeptWeights
from support.cpu_launchers import SerialLauncher

BLOCKS = KeptBlocks(CpuFeatures("AVX512", kleidiai=False))
CODES = KeptCodes(CpuCompute.on(SerialLauncher(2)))
KEPT: dict[str, KeptWeights] = {
    "torch-x86": BLOCKS,
    "torch-aarch64": KeptBlocks(CpuFeatures("DEFAULT", kleidiai=True)),
    "kernels": CODES,
    "portable-kernels": KeptCodes(CpuCompute.on(SerialLauncher(3), Processor.detect().portable())),
}
