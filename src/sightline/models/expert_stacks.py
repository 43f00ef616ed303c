"""Loads experts as stacked weights, from either way in which checkpoints store them.

Weights that are stored in a form that the product can decode stay in it. Memory is taken for the result and for one
stored tensor at a time. Needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.kernels.packed_weights import FP8_BLOCK, WeightForm
from sightline.kernels.triton.experts import StackedWeights
from sightline.kernels.triton.overlap import overlaps_on
from sightline.layers.activation import Gate
from sightline.layers.moe import ExpertCompute
from sightline.layers.stacked_experts import StackedExperts
from sightline.models.weights import WeightReader


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of a layer's experts."""

    held: range
    """The numbers of those that are loaded."""
    size: int
    hidden_size: int
    others: bool
    """True if other ranks have other experts."""

    @property
    def part(self) -> range | None:
        """The experts that are loaded; None if these are all."""
        return self.held if self.others else None


def stack_separate(
    weights: WeightReader, prefix: str, sizes: ExpertSizes, gate: Gate, *, parts: Sequence[str]
) -> StackedExperts:
    """Experts with a tensor for each of the `parts`, under their number: gate, up and down, or up and down."""
    size, hidden = sizes.size, sizes.hidden_size
    names = [[f"{prefix}.{number}.{part}_proj.weight" for part in parts] for number in sizes.held]
    form = weights.form_of(name for expert in names for name in expert)
    join = _JOINS.get(form, _join_plain)
    gate_up = join(weights, [expert[:-1] for expert in names], (size, hidden))
    down = join(weights, [expert[-1:] for expert in names], (hidden, size))
    return StackedExperts(gate_up, down, gate, overlaps_on(weights.device), len(parts) == 2, sizes.part)


def stack_stacked(weights: WeightReader, prefix: str, sizes: ExpertSizes, gate: Gate) -> StackedExperts:
    """Experts that are stored as one tensor, inputs first, gate and up interleaved, with biases."""
    num_experts, size, hidden = len(sizes.held), sizes.size, sizes.hidden_size
    gate_up_name, down_name = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
    gate_up_bias = _gates_first(weights.take(f"{gate_up_name}_bias", (num_experts, 2 * size)))
    down_bias = weights.take(f"{down_name}_bias", (num_experts, hidden))
    shapes = {gate_up_name: (num_experts, hidden, 2 * size), down_name: (num_experts, size, hidden)}
    if weights.form_of(shapes) is WeightForm.MXFP4:
        codes, scales = map(_gates_first, weights.take_packed(gate_up_name, shapes[gate_up_name]))
        gate_up = StackedWeights(codes, gate_up_bias, WeightForm.MXFP4, scales)
        codes, scales = weights.take_packed(down_name, shapes[down_name])
        down = StackedWeights(codes, down_bias, WeightForm.MXFP4, scales)
        return StackedExperts(gate_up, down, gate, overlaps_on(weights.device), held=sizes.part)
    joined = _gates_first(weights.take(gate_up_name, shapes[gate_up_name]).mT)
    down = StackedWeights(weights.take(down_name, shapes[down_name]).mT.contiguous(), down_bias)
    return StackedExperts(
        StackedWeights(joined, gate_up_bias), down, gate, overlaps_on(weights.device), held=sizes.part
    )


def _gates_first(interleaved: Tensor) -> Tensor:
    """Reorders the outputs of all experts, dimension 1, from (gate, up, gate, up, ...) to all gates, then all ups."""
    return torch.cat((interleaved[:, ::2], interleaved[:, 1::2]), dim=1).contiguous()


def _join_plain(weights: WeightReader, names: Sequence[Sequence[str]], shape: tuple[int, int]) -> StackedWeights:
    """The matrices of `shape` of each expert, one below the other."""
    joined = weights.empty((len(names), len(names[0]), *shape))
    for expert, places in zip(names, joined, strict=True):
        for name, place in zip(expert, places, strict=True):
            place.copy_(weights.take(name, shape))
    return StackedWeights(joined.flatten(1, 2))


def _join_mxfp4(weights: WeightReader, names: Sequence[Sequence[str]], shape: tuple[int, int]) -> StackedWeights:
    """Like `_join_plain`, as codes and scales."""
    leading, (outputs, inputs) = (len(names), len(names[0])), shape
    codes = torch.empty((*leading, outputs, inputs // 2), dtype=torch.uint8, device=weights.device)
    scales = torch.empty((*leading, outputs, inputs // 32), dtype=torch.uint8, device=weights.device)
    for number, expert in enumerate(names):
        for part, name in enumerate(expert):
            codes[number, part], scales[number, part] = weights.take_packed(name, shape)
    return StackedWeights(codes.flatten(1, 2), None, WeightForm.MXFP4, scales.flatten(1, 2))


def _join_fp8(weights: WeightReader, names: Sequence[Sequence[str]], shape: tuple[int, int]) -> StackedWeights:
    """Like `_join_plain`, as codes and scales."""
    blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
    leading = (len(names), len(names[0]))
    codes = torch.empty((*leading, *shape), dtype=torch.float8_e4m3fn, device=weights.device)
    scales = torch.empty((*leading, *blocks), dtype=torch.float32, device=weights.device)
    for number, expert in enumerate(names):
        for part, name in enumerate(expert):
            codes[number, part], scales[number, part] = weights.take_packed(name, shape)
    in_fp8 = weights.expert_compute is ExpertCompute.AT_ONCE_IN_FP8
    form = WeightForm.FP8_PRODUCTS if in_fp8 else WeightForm.FP8_BLOCKS
    return StackedWeights(codes.flatten(1, 2), None, form, scales.flatten(1, 2))


_JOINS = {WeightForm.FP8_BLOCKS: _join_fp8, WeightForm.MXFP4: _join_mxfp4}
"""What joins the matrices of experts that are stored in a form; those of others are joined as numbers."""
