"""Quantised weights of a projection: small integers in groups that share a scale, and perhaps a minimum.

    w = scale * step * (code - zero) + minimum * minimum_step

Scales and minima are fp16. Some types have one per 32 inputs, and no steps. Others have one per 256 inputs, and whole
numbers, the steps, by which each group of 16 or 32 inputs multiplies them. The form between a file and a product. Does
not know file formats, nor how a product packs the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MINIMUM_GROUP = 32
"""The number of inputs that share a minimum."""


class CodeForm(NamedTuple):
    """What the weights of one type have in common."""

    bits: int
    """The width of the codes: 4, 5, 6 or 8."""
    zero: int
    """The code that stands for 0, if there are no minima."""
    group: int
    """The number of inputs that share a scale with its step: 16 or 32."""
    span: int
    """The number of inputs that share a fp16 scale: `group`, or 256 if there are steps."""
    has_minima: bool

    @property
    def has_steps(self) -> bool:
        return self.span != self.group


@dataclass(frozen=True, eq=False)
class CodedWeights:
    """The quantised weights of a matrix [out_features, in_features]. `in_features` is a multiple of the form's span."""

    form: CodeForm
    codes: Tensor
    """[out_features, in_features] uint8, one byte per code."""
    scales: Tensor
    """[out_features, in_features / span] fp16."""
    minima: Tensor | None
    """[out_features, in_features / span] fp16 if the form has minima."""
    steps: Tensor | None
    """[out_features, in_features / group] int8 if the form has steps."""
    minimum_steps: Tensor | None
    """[out_features, in_features / 32] int8 if the form has steps and minima."""

    def __post_init__(self) -> None:
        form, (rows, columns) = self.form, self.codes.shape
        expected: dict[str, int | None] = {
            "scales": form.span,
            "minima": form.span if form.has_minima else None,
            "steps": form.group if form.has_steps else None,
            "minimum_steps": MINIMUM_GROUP if form.has_steps and form.has_minima else None,
        }
        for name, inputs in expected.items():
            part: Tensor | None = getattr(self, name)
            shape = None if inputs is None else (rows, columns // inputs)
            if columns % form.span or shape != (None if part is None else part.shape):
                got = "none" if part is None else list(part.shape)
                raise ValueError(f"expected {name} of shape {shape} for {form} and codes {[rows, columns]}, got {got}")

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    def group_scales(self) -> Tensor:
        """[out_features, in_features / group] fp32: the scales times their steps, exactly."""
        return _expanded(self.scales, self.steps)

    def group_minima(self) -> Tensor | None:
        """[out_features, in_features / 32] fp32: the minima times their steps, exactly."""
        return None if self.minima is None else _expanded(self.minima, self.minimum_steps)

    def rows(self, start: int, stop: int) -> CodedWeights:
        """A view of some rows."""
        return self.moved(lambda part: part[start:stop])

    def moved(self, move: Callable[[Tensor], Tensor]) -> CodedWeights:
        """Returns the weights with `move` applied to each tensor: it may choose and reorder rows, dimension 0."""
        return CodedWeights(
            self.form,
            move(self.codes),
            move(self.scales),
            None if self.minima is None else move(self.minima),
            None if self.steps is None else move(self.steps),
            None if self.minimum_steps is None else move(self.minimum_steps),
        )

    def dequantised(self) -> Tensor:
        """[out_features, in_features] fp32, with the operations of the decoders of files in their order."""
        values = (self.codes.float() - self.form.zero).view(self.out_features, -1, self.form.group)
        values.mul_(self.group_scales().unsqueeze(-1))
        minima = self.group_minima()
        if minima is not None:
            values.view(self.out_features, -1, MINIMUM_GROUP).add_(minima.unsqueeze(-1))
        return values.view(self.codes.shape)


def join(parts: Sequence[CodedWeights]) -> list[CodedWeights]:
    """Joins neighbours of the same form into one whose outputs are side by side. The order stays."""
    joined: list[CodedWeights] = []
    for part in parts:
        if joined and joined[-1].form == part.form:
            joined[-1] = _side_by_side(joined[-1], part)
        else:
            joined.append(part)
    return joined


def _side_by_side(left: CodedWeights, right: CodedWeights) -> CodedWeights:
    def both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
        return None if first is None or second is None else torch.cat((first, second))

    return CodedWeights(
        left.form,
        torch.cat((left.codes, right.codes)),
        torch.cat((left.scales, right.scales)),
        both(left.minima, right.minima),
        both(left.steps, right.steps),
        both(left.minimum_steps, right.minimum_steps),
    )


def _expanded(halves: Tensor, steps: Tensor | None) -> Tensor:
    if steps is None:
        return halves.float()
    groups = steps.view(len(halves), halves.shape[1], -1).float()
    return groups.mul_(halves.float().unsqueeze(-1)).view(steps.shape)
