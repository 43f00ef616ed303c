"""The states of a recurrent layer, in every slot. Does not know which slots a step reads or writes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sightline.attention.spec import RecurrentSpec
from sightline.cache.states import StatePool


class LayerStates(NamedTuple):
    """The states of one layer."""

    state: Tensor
    """[num_slots, num_heads, key_dim, value_dim] fp32."""
    tail: Tensor | None
    """[num_slots, channels, conv_width - 1] fp32; None without a convolution."""


def states_by_layer(spec: RecurrentSpec, pool: StatePool) -> tuple[LayerStates, ...]:
    """The states of each layer of a group."""
    states = pool.plane("state").unbind(0)
    tails = pool.plane("tail").unbind(0) if spec.conv_width else (None,) * len(states)
    return tuple(map(LayerStates, states, tails))
