"""A coverage that leaves no gap in a demand, without a case being tried."""

from __future__ import annotations

import itertools

from sightline.attention.coverage import _SIGNS, Coverage, Demand, _pairs
from sightline.attention.dimensions import Dimension


def coverage_of(demand: Demand) -> Coverage:
    """Every value, every two of them, and every end and corner of the scales."""
    dimensions = [each for each in Dimension if each in demand.scales or each in demand.values]
    met, reach, corners = {}, {}, {}
    for pair in _pairs(dimensions):
        one, two = pair
        if one.is_scale:
            first, second = demand.scales[one], demand.scales[two]
            corners[pair] = tuple(
                ((first.high if a > 0 else first.low, second.high if b > 0 else second.low),) for a, b in _SIGNS
            )
        elif two.is_scale:
            reach[pair] = dict.fromkeys(demand.values[one], demand.scales[two])
        else:
            met[pair] = frozenset(itertools.product(demand.values[one], demand.values[two]))
    return Coverage(demand.scales, demand.values, met, reach, corners)
