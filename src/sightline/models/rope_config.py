"""What the rope fields of a config mean: both the older `rope_theta` + `rope_scaling` and `rope_parameters`."""

from __future__ import annotations

import math
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
_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    }
)


def rotary_spec(parameters: Mapping[str, object], head_dim: int, theta: float) -> RotarySpec:
    """One rotary embedding from its parameter section; `theta` where the section names none."""
    unknown = set(parameters) - _KEYS
    if unknown:
        names = ", ".join(sorted(unknown))
        raise UnsupportedModelError(f"rope: expected settings out of {', '.join(sorted(_KEYS))}, got {names}")
    partial = _positive(parameters, "partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise UnsupportedModelError(f"rope: expected partial_rotary_factor 1.0, got {partial}")
    if head_dim % 2:
        raise UnsupportedModelError(f"rope: expected an even head dimension, got {head_dim}")
    return RotarySpec(head_dim, _positive(parameters, "rope_theta", theta), _scaling(parameters))


def with_frequency_factors(spec: RotarySpec, factors: list[object] | None) -> RotarySpec:
    """The spec with the per-frequency factors that a GGUF file carries."""
    if factors is None:
        return spec
    if spec.scaling is not None:
        raise UnsupportedModelError(f"rope: expected frequency factors or {spec.scaling}, got both")
    values = tuple(float(value) for value in factors if isinstance(value, (int, float)) and 0.0 < value < math.inf)
    if len(values) != len(factors) or len(values) != spec.head_dim // 2:
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
            return LinearScaling(_positive(parameters, "factor", None))
        case "llama3":
            return Llama3Scaling(
                factor=_positive(parameters, "factor", None),
                low_freq_factor=_positive(parameters, "low_freq_factor", None),
                high_freq_factor=_positive(parameters, "high_freq_factor", None),
                original_max_positions=int(_positive(parameters, "original_max_position_embeddings", None)),
            )
        case _:
            raise UnsupportedModelError(f"rope: expected scaling default, linear or llama3, got {kind!r}")


def _positive(parameters: Mapping[str, object], name: str, default: float | None) -> float:
    value = parameters.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
        raise UnsupportedModelError(f"rope: expected a finite number above 0 for {name}, got {value!r}")
    return float(value)
