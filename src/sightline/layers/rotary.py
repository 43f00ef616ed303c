"""Rotary position embeddings, as data. Operations compute the cosines and sines of a step once, for all layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearScaling:
    """Divides positions by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Stretches long wavelengths by `factor` and keeps short ones, with a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """Keeps high frequencies and divides low ones by `factor`, with a ramp over the dimensions between."""

    factor: float
    beta_fast: float
    """Frequencies with at least this many turns within the original length are kept."""
    beta_slow: float
    """Frequencies with at most this many turns are divided."""
    original_max_positions: int
    truncate: bool
    """True if the ends of the ramp are rounded to whole dimensions."""
    attention_factor: float
    """Multiplies cosines and sines, so scores are multiplied by its square."""


@dataclass(frozen=True)
class FrequencyFactors:
    """Divides each frequency by its own factor, as GGUF files store a scaling."""

    factors: tuple[float, ...]


@dataclass(frozen=True)
class ProportionalScaling:
    """Divides positions by `factor`, and turns only the first pairs, by the angles that they have in a whole head."""

    factor: float
    num_turning: int
    """The number of pairs that turn."""


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors | ProportionalScaling


@dataclass(frozen=True)
class RotarySpec:
    """One kind of rotary embedding; layers with equal specs share a step's tables."""

    head_dim: int
    theta: float
    scaling: RopeScaling | None = None
    rotated_dim: int | None = None
    """The number of dimensions of a head that are rotated, the first pairs; None if all are."""
    window: int | None = None
    """The number of tokens in a compression window, if the layer also rotates entries; None if it has no entries."""

    def __post_init__(self) -> None:
        if self.rotated_dim is not None and self.amplitude != 1.0:
            raise ValueError("a factor on the cosines of heads that are rotated in part is not supported yet")

    @property
    def amplitude(self) -> float:
        """The factor on cosines and sines."""
        return self.scaling.attention_factor if isinstance(self.scaling, YarnScaling) else 1.0


class Halves(NamedTuple):
    """Heads, and views of the two halves of their dimensions, which a rotation pairs."""

    whole: Tensor
    """[num_tokens, heads, head_dim]."""
    first: Tensor
    second: Tensor

    @staticmethod
    def of(heads: Tensor) -> Halves:
        return Halves(heads, *heads.chunk(2, dim=-1))


class WindowTable(NamedTuple):
    """What layers whose entries stand for windows of several tokens know of each token's window."""

    places: Tensor
    """[num_tokens] int64: the token's place in its window."""
    cos: Tensor
    """[num_tokens, head_dim / 2] fp32: the cosines at the first position of the window."""
    sin: Tensor


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """The cosines and sines of a step."""

    cos: Tensor
    """[num_tokens, 1, head_dim], the same in both halves."""
    sin: Tensor
    """[num_tokens, 1, head_dim / 2]."""
    minus_sin: Tensor
    """-`sin`, of the same shape."""
    windows: WindowTable | None = None
    """None if the spec has no window."""


class Rotary:
    """What the tables of one spec are computed from."""

    def __init__(self, spec: RotarySpec, device: torch.device) -> None:
        self.frequencies = inverse_frequencies(spec).to(device)
        """[head_dim / 2] fp32: radians per position."""
        self.amplitude = spec.amplitude


def inverse_frequencies(spec: RotarySpec) -> Tensor:
    """The radians per position for each pair of dimensions, [head_dim / 2] fp32. Pairs that do not turn have 0."""
    if spec.rotated_dim is None:
        return _frequencies(spec)
    turning = _frequencies(replace(spec, head_dim=spec.rotated_dim, rotated_dim=None))
    return torch.cat((turning, turning.new_zeros(spec.head_dim // 2 - len(turning))))


def _frequencies(spec: RotarySpec) -> Tensor:
    """The frequencies of a head that is rotated as a whole."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    periods = spec.theta**exponents
    frequencies = 1.0 / periods
    match spec.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case ProportionalScaling(factor, num_turning):
            frequencies[num_turning:] = 0.0
            return frequencies / factor
        case FrequencyFactors(factors):
            return frequencies / torch.tensor(factors, dtype=torch.float32)
        case Llama3Scaling() as scaling:
            return _llama3_frequencies(frequencies, scaling)
        case YarnScaling() as scaling:
            return _yarn_frequencies(periods, spec, scaling)


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


def _yarn_frequencies(periods: Tensor, spec: RotarySpec, scaling: YarnScaling) -> Tensor:
    first, last = (_yarn_dimension(spec, scaling, turns) for turns in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0.0), min(last, spec.head_dim - 1.0)
    width = (last - first) or 0.001  # avoids a division by 0: the ramp becomes a step
    kept = 1.0 - ((torch.arange(len(periods), dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    # Keep this order of operations: models were trained with its rounding, which positions multiply.
    return 1.0 / (scaling.factor * periods) * (1.0 - kept) + 1.0 / periods * kept


def _yarn_dimension(spec: RotarySpec, scaling: YarnScaling, turns: float) -> float:
    """The (fractional) pair of dimensions that makes `turns` turns within the original length."""
    wavelength = scaling.original_max_positions / (turns * 2 * math.pi)
    return spec.head_dim * math.log(wavelength) / (2 * math.log(spec.theta))
