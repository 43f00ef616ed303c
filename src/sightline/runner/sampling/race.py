"""Draws tokens without a host read, for a GPU.

Draws what `draw` draws, by operations whose shapes do not depend on the values of the logits. The tokens that top-k and
top-p keep are a prefix of the vocabulary sorted by falling logit, equal ones in the order of their ids. A prefix ends
within the tokens of one logit, which is found digit by digit:

    kept = the tokens above that logit, and the first few of those equal to it

A row with a NaN or an infinity draws some token of the vocabulary, and does not affect other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from sightline.core.memory import SAMPLED_LOGITS
from sightline.core.request import EffectiveParams
from sightline.runner.sampling.noise import key_words, log_exponential, packed_words
from sightline.runner.sampling.nucleus import masses, share_limit

_BLOCK_SIZE = SAMPLED_LOGITS
"""The number of logits processed at a time. `core.memory.drawing_bytes` reserves what that takes."""
_DIGIT_BITS = 11
_SHIFTS = (22, 11, 0)


@dataclass(frozen=True, eq=False)
class Race:
    """The parameters of the rows that draw, on the device: rows with top-k, then rows with top-p alone, then others."""

    ends: tuple[int, int, int]
    """Where each of the three kinds ends."""
    index: Tensor
    """[num_drawn] int64: the row of the logits."""
    temperature: Tensor
    """[num_drawn, 1] fp64, as are `top_p` and `min_p`."""
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    """[num_drawn, 1] int64."""
    words: Tensor
    """The keys of the noise, [num_drawn, 4] int32."""

    def at(self, start: int, end: int) -> Race:
        """Some of the rows."""
        part = slice(start, end)
        columns = (self.index, self.temperature, self.top_p, self.min_p, self.top_k, self.words)
        return Race((0, 0, 0), *[column[part] for column in columns])


class RaceArrays(NamedTuple):
    """The parameters of a race, on the host; the arrays are to be copied to the device."""

    ends: tuple[int, int, int]
    integers: NDArray[numpy.int64]
    """[4, num_drawn]: row, top-k, and the two integers of the key's words."""
    numbers: NDArray[numpy.float64]
    """[3, num_drawn]: temperature, top-p, min-p."""

    def on_device(self, integers: Tensor, numbers: Tensor) -> Race:
        temperature, top_p, min_p = numbers.unsqueeze(2)
        return Race(self.ends, integers[0], temperature, top_p, min_p, integers[1:2].T, key_words(integers[2:].T))


def race_arrays(
    drawn: Sequence[tuple[int, EffectiveParams]], keys: NDArray[numpy.uint64], vocab_size: int
) -> RaceArrays:
    """The parameters of the rows that draw: each one's index in the logits and its own, and the keys of their noise."""
    params = [each for _, each in drawn]
    top_k = numpy.array([each.top_k for each in params], dtype=numpy.int64)
    columns = [[each.temperature for each in params], [each.top_p for each in params], [each.min_p for each in params]]
    numbers = numpy.array(columns, dtype=numpy.float64)
    kind = numpy.where((top_k > 0) & (top_k < vocab_size), 0, numpy.where(numbers[1] < 1.0, 1, 2))
    order = kind.argsort(kind="stable")
    first, second, end = numpy.bincount(kind, minlength=3).cumsum().tolist()
    rows = numpy.array([row for row, _ in drawn], dtype=numpy.int64)
    integers = numpy.stack([rows, top_k, *packed_words(keys).T])
    return RaceArrays((first, second, end), integers[:, order], numbers[:, order])


def run(logits: Tensor, race: Race) -> Tensor:
    """One token for each row of the race, [num_drawn] int64; logits [num_rows, vocab_size] fp32."""
    block = max(1, _BLOCK_SIZE // logits.shape[1])
    keeps: tuple[Keep, ...] = (_top_k_and_p, _top_p, _all)
    winners = [
        _winners(logits.index_select(0, part.index), part, keep)
        for keep, (begin, end) in zip(keeps, pairwise((0, *race.ends)), strict=True)
        for start in range(begin, end, block)
        for part in [race.at(start, min(start + block, end))]
    ]
    return torch.cat(winners)


class Cut(NamedTuple):
    """The end of a prefix of the sorted vocabulary."""

    key: Tensor
    """[num_rows, 1] int64: keys above it are kept."""
    num_equal: Tensor
    """[num_rows, 1] int64: so many of the keys equal to it are kept, by their ids."""


Keep = Callable[[Tensor, Tensor, Race], Tensor]
"""Which tokens are kept, a bool that broadcasts, from logits fp32 and distances fp64, both [num_rows, vocab_size]."""


def _winners(logits: Tensor, race: Race, keep: Keep) -> Tensor:
    largest = logits.amax(dim=-1, keepdim=True)
    distance = (logits.double() - largest).div_(race.temperature)
    kept = keep(logits, distance, race) & (distance.exp() >= race.min_p)
    tokens = torch.arange(logits.shape[1], device=logits.device).unsqueeze(0)
    score = distance.sub_(log_exponential(race.words.unsqueeze(1), tokens))
    return score.masked_fill_(~kept, -torch.inf).argmax(dim=-1)


def _all(logits: Tensor, distance: Tensor, race: Race) -> Tensor:
    del distance, race
    return logits.new_ones((1, 1), dtype=torch.bool)


def _top_p(logits: Tensor, distance: Tensor, race: Race) -> Tensor:
    keys, mass = _keys(logits), masses(distance)
    return _prefix(keys, _share_cut(keys, mass, mass.sum(dim=-1, keepdim=True), race.top_p))


def _top_k_and_p(logits: Tensor, distance: Tensor, race: Race) -> Tensor:
    keys, mass = _keys(logits), masses(distance)
    key, above = _reached(keys, torch.ones_like(keys), race.top_k)
    by_rank = Cut(key, race.top_k - above)
    total = mass.where(keys > key, 0).sum(dim=-1, keepdim=True) + by_rank.num_equal * _mass_at(keys, mass, key)
    by_share = _share_cut(keys, mass, total, race.top_p)
    all_shares = race.top_p >= 1.0
    return _prefix(keys, Cut(*[one.where(all_shares, other) for one, other in zip(by_rank, by_share, strict=True)]))


def _share_cut(keys: Tensor, mass: Tensor, total: Tensor, top_p: Tensor) -> Cut:
    limit = share_limit(top_p, total)
    key, above = _reached(keys, mass, limit)
    each = _mass_at(keys, mass, key).clamp_(min=1)
    return Cut(key, (limit - above + each - 1) // each)


def _mass_at(keys: Tensor, mass: Tensor, key: Tensor) -> Tensor:
    """The mass of each token of a key, [num_rows, 1]."""
    return mass.where(keys == key, 0).amax(dim=-1, keepdim=True)


def _prefix(keys: Tensor, cut: Cut) -> Tensor:
    equal = keys == cut.key
    return (keys > cut.key) | (equal & (equal.cumsum(dim=-1) <= cut.num_equal))


def _keys(logits: Tensor) -> Tensor:
    """Integers from 0 to 2^32 - 1 in the order of the logits, int64. Adding 0 makes both zeros one."""
    bits = (logits + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) + (1 << 31)


def _reached(keys: Tensor, amounts: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The largest key for which the amounts of keys at least as large sum to `target` [num_rows, 1] int64.

    Returns it and the sum for larger keys, both [num_rows, 1] int64. Sums of integers are the same in any order.
    """
    last = (1 << _DIGIT_BITS) - 1
    key, above = torch.zeros_like(target), torch.zeros_like(target)
    for shift in _SHIFTS:
        digits = last - ((keys >> shift) & last)
        inside = amounts.where((keys >> (shift + _DIGIT_BITS)) == key, 0)
        sums = amounts.new_zeros((keys.shape[0], last + 1)).scatter_add_(1, digits, inside)
        up_to = sums.cumsum(dim=-1).add_(above)
        digit = (up_to < target).sum(dim=-1, keepdim=True).clamp_(max=last)
        above = up_to.gather(1, digit) - sums.gather(1, digit)
        key = (key << _DIGIT_BITS) + (last - digit)
    return key, above
