"""What `--quantization keep` means for experts on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sightline.core.config import LayerKernels, Quantization
from sightline.core.device import Device, DeviceKind
from sightline.core.ledger import Ledger
from sightline.core.resolution import ResolvedConfig
from sightline.kernels.cpu.program import inline_launcher
from sightline.layers.moe import ExpertCompute
from sightline.runner.quantised import expert_compute, kept_weights

KEEP, DEQUANTISE = Quantization.KEEP, Quantization.DEQUANTISE
TORCH, TRITON = LayerKernels.TORCH, LayerKernels.TRITON


def config(capability: tuple[int, int] | None, quantization: Quantization, kernels: LayerKernels) -> ResolvedConfig:
    kind = DeviceKind.CPU if capability is None else DeviceKind.CUDA
    device = Device(kind, torch.device(kind.value), "a device", capability)
    given: Any = SimpleNamespace(device=device, quantization=quantization, layer_kernels=kernels)
    return cast(ResolvedConfig, given)


@pytest.mark.parametrize(
    ("capability", "quantization", "kernels", "expected"),
    [
        (None, KEEP, TORCH, ExpertCompute.ONE_BY_ONE),
        ((9, 0), KEEP, TORCH, ExpertCompute.ONE_BY_ONE),
        ((9, 0), DEQUANTISE, TRITON, ExpertCompute.AT_ONCE),
        ((8, 9), KEEP, TRITON, ExpertCompute.AT_ONCE_IN_FP8),
        ((8, 0), KEEP, TRITON, ExpertCompute.AT_ONCE),
    ],
)
def test_experts_are_multiplied_in_fp8_where_asked_and_possible(
    capability: tuple[int, int] | None, quantization: Quantization, kernels: LayerKernels, expected: ExpertCompute
) -> None:
    assert expert_compute(config(capability, quantization, kernels)) is expected


def test_a_gpu_keeps_no_blocks_of_the_cpu_and_says_so() -> None:
    ledger = Ledger()
    assert kept_weights(config(None, KEEP, TORCH), inline_launcher(), ledger) is not None
    assert kept_weights(config((9, 0), DEQUANTISE, TRITON), inline_launcher(), ledger) is None
    assert not ledger.notes
    assert not ledger.degradations
    assert kept_weights(config((9, 0), KEEP, TRITON), inline_launcher(), ledger) is None
    assert kept_weights(config((8, 0), KEEP, TRITON), inline_launcher(), ledger) is None
    assert "multiplied in fp8" in ledger.notes[0].fact
    assert "changes nothing" in ledger.degradations[0].outcome
