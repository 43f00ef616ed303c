"""Reading of the rope fields of a config: the older `rope_theta` and `rope_scaling`, or `rope_parameters`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from sightline.core.errors import UnsupportedModelError
from sightline.layers.rotary import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    RotarySpec,
    YarnScaling,
)

DEFAULT_THETA = 10000.0
_NAMES = """
    rope_type type rope_theta partial_rotary_factor factor low_freq_factor high_freq_factor
    original_max_position_embeddings
"""
_KEYS = frozenset(_NAMES.split())
_YARN_KEYS = frozenset({"beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"})
_NOT_NULL = frozenset({"rope_theta", "original_max_position_embeddings"})
"""Settings for which null is refused. For the others null means the default."""
_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")
"""Scalings whose frequencies depend on the longest sequence of the running batch."""


def rotary_spec(
    parameters: Mapping[str, object], head_dim: int, theta: float, max_positions: int, *, may_be_partial: bool = False
) -> RotarySpec:
    """One rotary embedding from its section of the config.

    `theta` and `max_positions` are the defaults for the base and for the length before scaling. Unless
    `may_be_partial`, the section must rotate whole heads.
    """
    kind = _kind(parameters)
    if kind in _LENGTH_DEPENDENT:
        raise UnsupportedModelError(
            f"rope: expected scaling default, linear, llama3 or yarn, got {kind!r}: its frequencies depend on the "
            "length of the longest row while the model runs, so a row's result would depend on the rows beside it"
        )
    not_null = _NOT_NULL | {"partial_rotary_factor"} if may_be_partial else _NOT_NULL
    for name in not_null & set(parameters):
        if parameters[name] is None:
            raise UnsupportedModelError(f"rope: expected a number for {name}, got null; set it, or remove it")
    known = _KEYS | _YARN_KEYS if kind == "yarn" else _KEYS
    unknown = set(parameters) - known
    if unknown:
        names = ", ".join(sorted(unknown))
        raise UnsupportedModelError(f"rope: expected settings out of {', '.join(sorted(known))}, got {names}")
    partial = _positive(parameters, "partial_rotary_factor", 1.0)
    if partial != 1.0 and not may_be_partial:
        raise UnsupportedModelError(f"rope: expected partial_rotary_factor 1.0, got {partial}")
    if head_dim % 2:
        raise UnsupportedModelError(f"rope: expected an even head dimension, got {head_dim}")
    rotated = int(head_dim * partial)
    if not 0 < rotated <= head_dim or rotated % 2:
        raise UnsupportedModelError(
            f"rope: expected a partial_rotary_factor that rotates an even number of dimensions from 2 to {head_dim}, "
            f"got {partial}: {rotated} dimensions"
        )
    theta = _positive(parameters, "rope_theta", theta)
    scaling = _scaling(kind, parameters, theta, max_positions)
    return RotarySpec(head_dim, theta, scaling, None if rotated == head_dim else rotated)


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
    return replace(spec, scaling=FrequencyFactors(values))


def _scaling(kind: object, parameters: Mapping[str, object], theta: float, max_positions: int) -> RopeScaling | None:
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
                original_max_positions=_original_positions(parameters, max_positions),
            )
        case "yarn":
            return _yarn(parameters, theta, max_positions)
        case _:
            raise UnsupportedModelError(f"rope: expected scaling default, linear, llama3 or yarn, got {kind!r}")


def _yarn(parameters: Mapping[str, object], theta: float, max_positions: int) -> YarnScaling:
    if theta <= 1.0:
        raise UnsupportedModelError(f"rope: expected rope_theta above 1 for yarn, got {theta}")
    truncate = parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        raise UnsupportedModelError(f"rope: expected true or false for truncate, got {truncate!r}")
    factor = _positive(parameters, "factor", None)
    if parameters.get("attention_factor") is not None:
        attention_factor = _positive(parameters, "attention_factor", None)
    else:
        attention_factor = _yarn_attention_factor(parameters, factor)
    return YarnScaling(
        factor=factor,
        beta_fast=_positive(parameters, "beta_fast", 32.0),
        beta_slow=_positive(parameters, "beta_slow", 1.0),
        original_max_positions=_original_positions(parameters, max_positions),
        truncate=truncate,
        attention_factor=attention_factor,
    )


def _yarn_attention_factor(parameters: Mapping[str, object], factor: float) -> float:
    """The default of `attention_factor`: from the factor alone, or from the two `mscale` if the config has both."""
    if not (parameters.get("mscale") and parameters.get("mscale_all_dim")):
        return _yarn_growth(factor, 1.0)
    mscale, mscale_all_dim = (_positive(parameters, name, None) for name in ("mscale", "mscale_all_dim"))
    return _yarn_growth(factor, mscale) / _yarn_growth(factor, mscale_all_dim)


def yarn_score_scale(parameters: Mapping[str, object]) -> float:
    """The factor by which DeepSeek multiplies scores if its rope is scaled by YaRN, otherwise 1.

    All dimensions of queries and keys are scaled by `mscale_all_dim`, so scores are scaled by its square. The rotated
    dimensions are scaled by `mscale` instead: their cosines and sines are multiplied by the quotient.
    """
    if _kind(parameters) != "yarn" or not parameters.get("mscale_all_dim"):
        return 1.0
    return _yarn_growth(_positive(parameters, "factor", None), _positive(parameters, "mscale_all_dim", None)) ** 2


def _yarn_growth(factor: float, mscale: float) -> float:
    return 1.0 + (0.1 * mscale * math.log(factor) if factor > 1.0 else 0.0)


def same_type_key(parameters: Mapping[str, object]) -> dict[str, object]:
    """The section with `rope_type` in place of the older `type`."""
    renamed = {name: value for name, value in parameters.items() if name != "type"}
    return renamed | {"rope_type": _kind(parameters)}


def state_once(section: dict[str, object], key: str, value: object, name: str) -> None:
    """Copies a value from outside the section into it. Raises if the section has another value."""
    if section.get(key, value) != value:
        raise UnsupportedModelError(
            f"rope: expected one value, got {name} = {value!r} and {key} = {section[key]!r} in its section; remove the "
            "one that does not hold"
        )
    section[key] = value


def _kind(parameters: Mapping[str, object]) -> object:
    kinds = [parameters[name] for name in ("rope_type", "type") if name in parameters]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise UnsupportedModelError(
            f"rope: expected rope_type or type, or both alike, got {kinds[0]!r} and {kinds[1]!r}; remove the older type"
        )
    return kinds[0] if kinds else "default"


def _original_positions(parameters: Mapping[str, object], max_positions: int) -> int:
    """The context length before scaling."""
    value = _positive(parameters, "original_max_position_embeddings", float(max_positions))
    if value < 1.0:
        raise UnsupportedModelError(f"rope: expected original_max_position_embeddings of at least 1, got {value}")
    return int(value)


def _positive(parameters: Mapping[str, object], name: str, default: float | None) -> float:
    value = parameters.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
        raise UnsupportedModelError(f"rope: expected a finite number above 0 for {name}, got {value!r}")
    return float(value)
