"""Quantised weights of a file: whether they stay as they are, what computes with them, and the memory they take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from sightline.attention.groups import LayerGroup
from sightline.core.config import EngineConfig, LayerKernels, Quantization
from sightline.core.device import Device, DeviceKind
from sightline.core.hot_memory import ChosenFacts
from sightline.core.ledger import Ledger
from sightline.core.page_shape import CompressedEntries
from sightline.core.resolution import ModelFacts, ResolvedConfig
from sightline.kernels.block_product import CpuFeatures
from sightline.kernels.cpu.program import CpuLauncher
from sightline.kernels.packed_weights import packed_bytes
from sightline.layers.moe import ExpertCompute
from sightline.models.contract import Definition
from sightline.models.kept_weights import BlockRule, CodeRule, KeepRule, KeptBlocks, KeptWeights
from sightline.models.loading.checkpoint import Checkpoint

_MULTIPLIES_FP8 = (8, 9)
"""The lowest compute capability whose tensor cores multiply 8-bit floats."""


def counted_as(config: EngineConfig, device: Device) -> Quantization:
    """Returns whether quantised weights count in the model's memory as they are or dequantised."""
    return Quantization(config.quantization) if device.kind is DeviceKind.CPU else Quantization.DEQUANTISE


def note_keep(
    config: ResolvedConfig, checkpoint: Checkpoint, definition: Definition, groups: Sequence[LayerGroup], ledger: Ledger
) -> None:
    """Notes what `--quantization keep` would bring, where there are weights to keep."""
    if config.quantization is Quantization.KEEP or config.device.kind is not DeviceKind.CPU:
        return
    exact, kept = (model_facts(each, checkpoint, definition, groups) for each in Quantization)
    if kept.quantised_bytes:
        size = config.dtype.itemsize
        before, after = exact.weight_elements * size, kept.weight_elements * size + kept.quantised_bytes
        ledger.note(
            "--quantization keep",
            f"would hold the weights in {after >> 20:,} MiB instead of {before >> 20:,} MiB, and round the inputs of "
            f"products; measured with SmolLM2-135M, {keep_rule().measured}",
        )


def expert_compute(config: ResolvedConfig) -> ExpertCompute:
    """Returns the way in which the chosen kernels compute experts.

    It is in fp8 if quantised weights are to be kept and the card can.
    """
    capability = config.device.compute_capability
    if config.layer_kernels is not LayerKernels.TRITON:
        return ExpertCompute.ONE_BY_ONE
    if config.quantization is Quantization.KEEP and capability is not None and capability >= _MULTIPLIES_FP8:
        return ExpertCompute.AT_ONCE_IN_FP8
    return ExpertCompute.AT_ONCE


def kept_weights(config: ResolvedConfig, launcher: CpuLauncher, ledger: Ledger) -> KeptWeights | None:
    """The maker of layers with weights that stay quantised; None if they are dequantised, or the device is a GPU."""
    if config.quantization is not Quantization.KEEP:
        return None
    if config.device.kind is DeviceKind.CPU:
        return kept_on_cpu(launcher, ledger)
    if expert_compute(config) is ExpertCompute.AT_ONCE_IN_FP8:
        ledger.note(
            "--quantization keep",
            "experts that are stored in fp8 are multiplied in fp8, with inputs rounded to it; all other quantised "
            "weights are dequantised on a GPU",
        )
    else:
        ledger.degrade(
            "--quantization keep",
            f"changes nothing: on {config.device.name} with these kernels quantised weights are dequantised",
            "leave it out, or use a GPU of compute capability 8.9 or higher with layer_kernels triton",
        )
    return None


def has_cpu_kernels() -> bool:
    """True if the packages are installed that compile our CPU kernels."""
    return find_spec("numba") is not None and find_spec("llvmlite") is not None


def keep_rule() -> KeepRule:
    """Returns the rule for which weights can stay quantised on this CPU."""
    return CodeRule() if has_cpu_kernels() else BlockRule(CpuFeatures.detect())


def kept_on_cpu(launcher: CpuLauncher, ledger: Ledger) -> KeptWeights:
    """The maker of layers with weights that stay quantised on this CPU.

    The ledger says what a missing Numba costs, and if the processor has none of the instructions for such products.
    """
    if not has_cpu_kernels():
        ledger.degrade(
            "--quantization keep",
            f"only weights in {BlockRule.types} can stay quantised, and products with them are slower: numba is not "
            "installed",
            "install numba: pip install 'sightline[cpu]'",
        )
        return KeptBlocks(CpuFeatures.detect())
    # Imported here: numba is an extra.
    from sightline.kernels.cpu.processor import Processor
    from sightline.layers.cpu_compute import CpuCompute
    from sightline.models.kept_codes import KeptCodes

    processor = Processor.detect()
    if not processor.has_instructions:
        ledger.note(
            "--quantization keep",
            f"products take the portable form, which is slower: {processor.name} has no instructions that sum products "
            "of small integers, or none that Sightline knows",
        )
    return KeptCodes(CpuCompute.on(launcher, processor))


def chosen_facts(group: LayerGroup) -> ChosenFacts:
    """What layers that attend to chosen entries keep of each."""
    elements, count = sum(pool.entry_elements for pool in group.cache_spec(torch.float32).pools), len(group.layers)
    return ChosenFacts(group.spec.top_k or 0, 1, count, elements, elements // count, group.spec.tokens_per_entry)


def _cache_facts(groups: Sequence[LayerGroup]) -> dict[str, Any]:
    """The fields of `ModelFacts` that tell what is cached."""
    wide, narrow = ([group.cache_spec(dtype) for group in groups] for dtype in (torch.float32, torch.float16))
    pools = [pool for group in wide for pool in group.pools]
    wide_bytes, narrow_bytes = (sum(each.states.num_bytes for each in specs) for specs in (wide, narrow))
    # What is in the cache's dtype takes half as much in the narrow one.
    in_cache_dtype = 2 * (wide_bytes - narrow_bytes)
    return {
        "state_bytes": wide_bytes - in_cache_dtype,
        "state_elements": in_cache_dtype // torch.float32.itemsize,
        "cache_elements_per_token": sum(pool.entry_elements for pool in pools if pool.tokens_per_entry == 1),
        "compressed": tuple(
            CompressedEntries(pool.tokens_per_entry, pool.entry_elements) for pool in pools if pool.tokens_per_entry > 1
        ),
    }


def model_facts(
    quantization: Quantization, checkpoint: Checkpoint, definition: Definition, groups: Sequence[LayerGroup]
) -> ModelFacts:
    """The facts about a model that sizes depend on, from the checkpoint's headers."""
    rule = keep_rule() if quantization is Quantization.KEEP else None
    elements, quantised_bits = 0, 0
    for name, info in checkpoint.tensors.items():
        if name in definition.copies or name.startswith(definition.beside_prefixes):
            continue
        if rule is None or rule.projection_refusal([info]) is not None:
            elements += math.prod(info.shape)
        else:
            quantised_bits += math.prod(info.shape) * rule.bits(info, looked_up="embed" in name)
    packed = [
        (form, checkpoint.tensors[name].shape)
        for stack in definition.expert_stacks
        for form in stack.forms
        if all(name in checkpoint.tensors and checkpoint.tensors[name].packed is form for name in stack.names)
        for name in stack.names
    ]
    return ModelFacts(
        max_positions=definition.max_positions,
        vocab_size=definition.vocab_size,
        weight_elements=elements,
        quantised_bytes=quantised_bits // 8,
        packed_elements=sum(math.prod(shape) for _, shape in packed),
        packed_bytes=sum(packed_bytes(form, shape) for form, shape in packed),
        **_cache_facts(groups),
        scale_bytes_per_token=sum(
            pool.entry_bytes - pool.entry_elements
            for group in groups
            for pool in group.cache_spec(torch.float8_e4m3fn).pools
            if pool.tokens_per_entry == 1
        ),
        chosen=sum([chosen_facts(group) for group in groups if group.may_be_on_host], ChosenFacts()),
    )
