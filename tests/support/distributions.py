"""How counts are held against what is expected of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

SMALLEST_P_VALUE = 1e-4


def p_value(counts: Mapping[int, int], expected: Mapping[int, float]) -> float:
    """Of Pearson's chi-squared test: how likely counts at least so far from what is expected are."""
    assert min(expected.values()) > 5, "too few draws for the test to hold"
    statistic = sum((counts.get(key, 0) - mean) ** 2 / mean for key, mean in expected.items())
    freedom = len(expected) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2.0)))
