"""Reading of the config fields of Mamba-2 layers, which families name in their own ways."""

from __future__ import annotations

import math

from sightline.attention.spec import RecurrentSpec
from sightline.core.errors import UnsupportedModelError
from sightline.models.config_reader import MAX_LAYERS, ConfigReader
from sightline.models.shared_config import FULL, LINEAR

KINDS = {"mamba": LINEAR, "attention": FULL}
"""Older names of the kinds of layers."""
NO_LIMITS = (0.0, math.inf)


def mamba_spec(num_heads: int, num_groups: int, head_dim: int, state_size: int, conv_width: int) -> RecurrentSpec:
    """The recurrence of Mamba-2. A group of heads shares what it writes to the state and reads from it."""
    if num_heads > MAX_LAYERS or num_heads % num_groups:
        raise UnsupportedModelError(
            f"expected up to {MAX_LAYERS} Mamba heads in whole groups, got {num_heads} heads in {num_groups} groups"
        )
    return RecurrentSpec(
        num_heads=num_heads,
        num_key_heads=num_groups,
        key_dim=state_size,
        value_dim=head_dim,
        scale=1.0,
        delta_rule=False,
        channel_decay=False,
        unit_keys=False,
        conv_width=conv_width,
        skip=True,
    )


def time_limits(config: ConfigReader) -> tuple[float, float]:
    """The field `time_step_limit`: the least and the most time of a token. By default there are no limits."""
    if "time_step_limit" not in config:
        return NO_LIMITS
    listed = config.optional_list("time_step_limit") or []
    numbers = [_number(value) for value in listed]
    match numbers:
        case [float(least), float(most)] if 0.0 <= least <= most and least < math.inf:
            return least, most
        case _:
            raise UnsupportedModelError(
                f"expected time_step_limit to be two numbers from 0 on, the larger one last, got {listed!r}"
            )


def _number(value: object) -> float | None:
    """A number of a config; transformers writes infinity as {"__float__": "Infinity"}. None if it is no number."""
    match value:
        case bool():
            return None
        case int() | float():
            return float(value)
        case {"__float__": "Infinity"} | "Infinity" | "inf":
            return math.inf
        case _:
            return None
