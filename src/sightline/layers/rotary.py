"""Rotary position embedding. A step's cosines and sines are computed once and shared by all layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths stretched by `factor`, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class FrequencyFactors:
    """Each frequency divided by its own factor, as GGUF files store a scaling."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | FrequencyFactors


@dataclass(frozen=True)
class RotarySpec:
    """One kind of rotary embedding; layers with equal specs share a step's tables."""

    head_dim: int
    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """A step's rotations."""

    cos: Tensor
    """[num_tokens, 1, head_dim]."""
    sin: Tensor
    """[num_tokens, 1, head_dim]."""

    def rotate(self, x: Tensor) -> Tensor:
        """Rotates x [num_tokens, heads, head_dim]: dimension i pairs with i + head_dim / 2."""
        half = x.shape[-1] // 2
        swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return torch.addcmul(x * self.cos, swapped, self.sin)


class Rotary:
    """Makes tables for one spec."""

    def __init__(self, spec: RotarySpec, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(spec).to(device)

    def table(self, positions: Tensor, dtype: torch.dtype) -> RotaryTable:
        angles = positions.float()[:, None] * self._frequencies[None, :]
        doubled = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return RotaryTable(doubled.cos().to(dtype), doubled.sin().to(dtype))


def inverse_frequencies(spec: RotarySpec) -> Tensor:
    """[head_dim / 2] fp32: radians a position for each pair of dimensions."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequencies = 1.0 / (spec.theta**exponents)
    match spec.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case FrequencyFactors(factors):
            return frequencies / torch.tensor(factors, dtype=torch.float32)
        case Llama3Scaling() as scaling:
            return _llama3_frequencies(frequencies, scaling)


def _llama3_frequencies(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    longest_kept = scaling.original_max_positions / scaling.high_freq_factor
    shortest_stretched = scaling.original_max_positions / scaling.low_freq_factor
    ramp = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - ramp) * frequencies / scaling.factor + ramp * frequencies
    stretched = torch.where(wavelengths > shortest_stretched, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < longest_kept, frequencies, stretched)
