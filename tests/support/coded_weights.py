"""Random quantised weights of every form, and the definition of their product with quantised inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sightline.kernels.coded_weights import MINIMUM_GROUP, CodedWeights, CodeForm

FORMS = {
    "Q8_0": CodeForm(bits=8, zero=128, group=32, span=32, has_minima=False),
    "Q4_0": CodeForm(bits=4, zero=8, group=32, span=32, has_minima=False),
    "Q4_1": CodeForm(bits=4, zero=0, group=32, span=32, has_minima=True),
    "Q5_0": CodeForm(bits=5, zero=16, group=32, span=32, has_minima=False),
    "Q5_1": CodeForm(bits=5, zero=0, group=32, span=32, has_minima=True),
    "Q4_K": CodeForm(bits=4, zero=0, group=32, span=256, has_minima=True),
    "Q5_K": CodeForm(bits=5, zero=0, group=32, span=256, has_minima=True),
    "Q6_K": CodeForm(bits=6, zero=32, group=16, span=256, has_minima=False),
}


def random_coded(form: CodeForm, outputs: int, inputs: int, seed: int = 1) -> CodedWeights:
    """Weights whose codes have all values, and whose scales and steps differ from group to group."""
    generator = torch.Generator().manual_seed(seed)

    def halves(size: int, offset: float) -> Tensor:
        return ((torch.rand(outputs, inputs // size, generator=generator) + offset) / (1 << form.bits)).half()

    def whole(size: int, low: int, high: int) -> Tensor:
        return torch.randint(low, high, (outputs, inputs // size), generator=generator, dtype=torch.int8)

    has_steps = form.has_steps
    return CodedWeights(
        form,
        torch.randint(0, 1 << form.bits, (outputs, inputs), generator=generator, dtype=torch.uint8),
        halves(form.span, 0.25),
        -4 * halves(form.span, 0.0) if form.has_minima else None,
        whole(form.group, -128 if form.group == 16 else 0, 128 if form.group == 16 else 64) if has_steps else None,
        whole(MINIMUM_GROUP, 0, 64) if has_steps and form.has_minima else None,
    )


class RoundedInputs(NamedTuple):
    """Inputs in 8 bits."""

    codes: Tensor
    """[rows, blocks, 32] int64."""
    scales: Tensor
    """[rows, blocks] fp32."""


def round_inputs(x: Tensor) -> RoundedInputs:
    """The definition: each block of 32 is divided by its largest size and multiplied by 127, ties to even."""
    blocks = x.float().view(len(x), -1, 32)
    largest = blocks.abs().amax(dim=2)
    # Not `127.0 / largest`: torch rounds that twice, as a reciprocal and a product.
    inverse = torch.where(largest == 0, 0.0, torch.full_like(largest, 127.0) / largest)
    return RoundedInputs((blocks * inverse.unsqueeze(2)).round().long(), largest / 127.0)


def defined_product(weights: CodedWeights, x: Tensor) -> Tensor:
    """The product with rounded inputs [rows, outputs] in fp64: sums of integers are exact, the rest nearly so."""
    inputs, group = round_inputs(x), weights.form.group
    codes = (weights.codes.long() - weights.form.zero).view(weights.out_features, -1, group).double()
    by_group = inputs.codes.view(len(x), -1, group).double()
    sums = torch.einsum("ogi,rgi->rog", codes, by_group)
    scales = inputs.scales.double().repeat_interleave(32 // group, dim=1)
    product = torch.einsum("rog,og,rg->ro", sums, weights.group_scales().double(), scales)
    minima = weights.group_minima()
    if minima is not None:
        totals = inputs.codes.sum(dim=2).double() * inputs.scales.double()
        product += totals @ minima.double().t()
    return product
