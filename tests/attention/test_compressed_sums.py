"""Sums of tokens give the softmax over these tokens, however far their gates are from 0 and wherever a text is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sightline.attention.compressed.sums import mixed_sums, sum_tokens

NUM_WINDOWS, NUM_TOKENS, DIM = 3, 7, 5
levels = pytest.mark.parametrize("level", [-300.0, 0.0, 300.0])
"""The exponential of 300 is infinite in fp32, that of -300 is 0."""


def tokens(level: float, seed: int) -> tuple[Tensor, Tensor]:
    """Values, and gates around a level."""
    own = torch.Generator().manual_seed(seed)
    values, gates = (torch.randn(NUM_WINDOWS, NUM_TOKENS, DIM, generator=own) for _ in range(2))
    return values, level + gates


def empty() -> Tensor:
    """The sums of no tokens, as the empty state has them."""
    return torch.zeros(NUM_WINDOWS, 3, DIM)


def mixed(values: Tensor, gates: Tensor) -> Tensor:
    return (gates.softmax(dim=1) * values).sum(dim=1)


@levels
@pytest.mark.parametrize("cut", [0, 3, NUM_TOKENS - 1])
def test_a_window_may_be_cut_anywhere(level: float, cut: int) -> None:
    values, gates = tokens(level, 0)
    gates[:, :3] += 200.0
    sums = empty() if not cut else sum_tokens(empty(), values[:, :cut], gates[:, :cut])
    found = mixed_sums(sum_tokens(sums, values[:, cut:], gates[:, cut:]), None)
    torch.testing.assert_close(found, mixed(values, gates))


@levels
@pytest.mark.parametrize("other", [-300.0, 300.0])
def test_an_entry_mixes_two_windows_of_unlike_gates(level: float, other: float) -> None:
    (values, gates), (others, other_gates) = tokens(level, 0), tokens(other, 1)
    own, before = sum_tokens(empty(), values, gates), sum_tokens(empty(), others, other_gates)
    expected = mixed(torch.cat([others, values], dim=1), torch.cat([other_gates, gates], dim=1))
    torch.testing.assert_close(mixed_sums(own, before), expected)


@levels
@pytest.mark.parametrize("maximum", [0.0, 1000.0])
def test_sums_of_no_tokens_add_nothing_whatever_their_maximum_is(level: float, maximum: float) -> None:
    values, gates = tokens(level, 0)
    nothing = empty()
    nothing[:, 0] = maximum
    own = sum_tokens(nothing, values, gates)
    torch.testing.assert_close(mixed_sums(own, None), mixed(values, gates))
    torch.testing.assert_close(mixed_sums(own, nothing), mixed(values, gates))
