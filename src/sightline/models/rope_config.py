"""What the rope fields of a config mean: both the older `rope_theta` + `rope_scaling` and `rope_parameters`."""

from __future__ import annotations

from collections.abc import Mapping

from sightline.core.errors import UnsupportedModelError
from sightline.layers.rotary import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    RotarySpec,
)

DEFAULT_THETA = 10000.0


def rotary_spec(parameters: Mapping[str, object], head_dim: int, theta: float) -> RotarySpec:
    """One rotary embedding from its parameter section; `theta` where the section names none."""
    own_theta = _number(parameters, "rope_theta", theta)
    partial = _number(parameters, "partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise UnsupportedModelError(f"rope: expected partial_rotary_factor 1.0, got {partial}")
    return RotarySpec(head_dim, own_theta, _scaling(parameters))


def with_frequency_factors(spec: RotarySpec, factors: list[object] | None) -> RotarySpec:
    """The spec with the per-frequency factors that a GGUF file carries."""
    if factors is None:
        return spec
    values = tuple(float(value) for value in factors if isinstance(value, (int, float)))
    if len(values) != len(factors) or len(values) != spec.head_dim // 2 or not all(value > 0 for value in values):
        raise UnsupportedModelError(
            f"rope: expected {spec.head_dim // 2} positive frequency factors, got {len(factors)}"
        )
    return RotarySpec(spec.head_dim, spec.theta, FrequencyFactors(values))


def _scaling(parameters: Mapping[str, object]) -> RopeScaling | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(_number(parameters, "factor", None))
        case "llama3":
            return Llama3Scaling(
                factor=_number(parameters, "factor", None),
                low_freq_factor=_number(parameters, "low_freq_factor", None),
                high_freq_factor=_number(parameters, "high_freq_factor", None),
                original_max_positions=int(_number(parameters, "original_max_position_embeddings", None)),
            )
        case _:
            raise UnsupportedModelError(f"rope: expected scaling default, linear or llama3, got {kind!r}")


def _number(parameters: Mapping[str, object], name: str, default: float | None) -> float:
    value = parameters.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UnsupportedModelError(f"rope: expected a number for {name}, got {value!r}")
    return float(value)
