"""A token's noise is a pure, even and independent function of seed, place and token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.core.request import MAX_SEED
from sightline.runner.sampling.noise import coarse_noise, derived_seed, noise, noise_keys, token_words
from support.distributions import SMALLEST_P_VALUE, p_value
from support.sampling import words_of

CPU = torch.device("cpu")
SAMPLES = 6000
MASK32 = 0xFFFFFFFF


def values(seeds_and_places: Sequence[tuple[int, int]], token: int) -> list[float]:
    keys = noise_keys(*map(list, zip(*seeds_and_places, strict=True)))
    drawn: list[float] = noise(words_of(keys.tolist()), torch.full((len(keys),), token)).tolist()
    return drawn


def buckets(drawn: Sequence[float], count: int) -> float:
    """The p-value of `drawn` against equal buckets."""
    counts = Counter(int(value * count) for value in drawn)
    return p_value(counts, {bucket: len(drawn) / count for bucket in range(count)})


def cells(first: Sequence[float], second: Sequence[float]) -> float:
    """The p-value of the pairs against independence."""
    counts = Counter(int(one * 8) * 8 + int(other * 8) for one, other in zip(first, second, strict=True))
    return p_value(counts, dict.fromkeys(range(64), len(first) / 64))


def word(token: int, first: int, second: int) -> int:
    """The hash in integers without bounds."""
    scattered = (token + 0x9E3779B9) & MASK32
    scattered = ((scattered ^ (scattered >> 16)) * 0x85EBCA6B) & MASK32
    scattered = ((scattered ^ (scattered >> 13)) * 0xC2B2AE35) & MASK32
    scattered ^= scattered >> 16
    mixed = ((scattered ^ first) * 0x21F0AAAD) & MASK32
    mixed = (((mixed ^ (mixed >> 16)) + second) * 0xD35A2D97) & MASK32
    return ((mixed ^ (mixed >> 15)) * 0x735A2D97) & MASK32


keys = st.integers(0, 2**64 - 1)


@settings(max_examples=100, deadline=None)
@given(key=keys, tokens=st.lists(st.integers(0, 300_000), min_size=1, max_size=20))
def test_the_vectorised_hash_is_the_one_of_plain_integers(key: int, tokens: list[int]) -> None:
    words = words_of([key])
    first, second, third, fourth = (each & MASK32 for each in words[0].tolist())
    assert (first, second) == (key & MASK32, key >> 32)
    expected = []
    for token in tokens:
        high, low = ((word(token, *pair) + 2**31) & MASK32 for pair in ((first, second), (third, fourth)))
        expected.append((high * 2**20 + (low >> 12) + 0.5) / 2**52)
    assert noise(words, torch.tensor(tokens)).tolist() == expected


def mixed(value: int) -> int:
    value &= 2**64 - 1
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return value ^ (value >> 31)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(keys, st.integers(0, 2**31)), min_size=1, max_size=5))
def test_keys_and_derived_seeds_are_those_of_plain_integers(named: list[tuple[int, int]]) -> None:
    golden = 0x9E3779B97F4A7C15
    expected = [mixed(mixed(seed) + (place + 1) * golden) for seed, place in named]
    assert noise_keys([seed for seed, _ in named], [place for _, place in named]).tolist() == expected
    halves = words_of(expected)[:, 2:].tolist()
    assert [(low & MASK32) | (high & MASK32) << 32 for low, high in halves] == [mixed(key + golden) for key in expected]
    assert derived_seed(named[0][0], 3) == mixed(mixed(named[0][0] ^ golden) + 3 * golden)


@settings(max_examples=50, deadline=None)
@given(key=keys)
def test_coarse_noise_is_the_upper_part_of_the_whole(key: int) -> None:
    words = words_of([key, key ^ 1])
    whole = noise(words.unsqueeze(1), torch.arange(500).expand(2, -1))
    coarse = coarse_noise(words, token_words(500, CPU)).double() + 2.0**31
    assert torch.equal((whole * 2.0**32).floor(), coarse)


def test_neither_end_is_reached() -> None:
    """The extremes of the hashed words, put together as `noise` puts them."""
    smallest, largest = (torch.tensor([bits]).to(torch.float64).add_(0.5).mul_(2.0**-52) for bits in (0, 2**52 - 1))
    assert float(smallest) > 0.0
    assert float(largest) < 1.0
    assert torch.isfinite((-torch.cat([smallest, largest])).log1p().neg().log()).all()


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, MAX_SEED), place=st.integers(0, 2**40), token=st.integers(0, 300_000))
def test_noise_is_a_function_of_seed_place_and_token(seed: int, place: int, token: int) -> None:
    [value] = values([(seed, place)], token)
    assert 0.0 < value < 1.0
    assert [value] == values([(seed, place)], token)
    others = values([(seed, place + 1), ((seed + 1) & MAX_SEED, place)], token) + values([(seed, place)], token + 1)
    assert value not in others


@pytest.mark.parametrize("token", [0, 1, 262_143])
@pytest.mark.parametrize("seed", [0, 1, 12345, MAX_SEED])
def test_noise_is_uniform_over_places(seed: int, token: int) -> None:
    assert buckets(values([(seed, place) for place in range(SAMPLES)], token), 64) > SMALLEST_P_VALUE


@pytest.mark.parametrize("place", [0, 1, 1000])
def test_noise_is_uniform_over_neighbouring_seeds(place: int) -> None:
    assert buckets(values([(seed, place) for seed in range(SAMPLES)], 17), 64) > SMALLEST_P_VALUE


@pytest.mark.parametrize("place", [0, 1, 1000])
def test_noise_is_uniform_over_tokens(place: int) -> None:
    drawn = noise(words_of(noise_keys([3], [place]).tolist()), torch.arange(SAMPLES)).tolist()
    assert buckets(drawn, 64) > SMALLEST_P_VALUE


@pytest.mark.parametrize("step", [(0, 1), (1, 0), (1, -1)], ids=["places", "seeds", "both"])
def test_neighbours_are_independent(step: tuple[int, int]) -> None:
    named = [(7, place) for place in range(1, SAMPLES + 1)]
    beside = [(seed + step[0], place + step[1]) for seed, place in named]
    assert cells(values(named, 5), values(beside, 5)) > SMALLEST_P_VALUE


@pytest.mark.parametrize(
    "pair", [(0, 1), (1, 2), (5, 4101), (100, 65636), (18_999, 119_735), (31_010, 156_165), (114_047, 142_024)]
)
def test_tokens_of_one_draw_are_independent(pair: tuple[int, int]) -> None:
    """The last three pairs' scattered ids differ in one bit: the highest, the second and the lowest."""
    named = [(11, place) for place in range(SAMPLES)]
    assert cells(values(named, pair[0]), values(named, pair[1])) > SMALLEST_P_VALUE


def test_every_token_has_the_least_noise_equally_often() -> None:
    count, races = 200, 20_000
    coarse = coarse_noise(words_of(noise_keys([9] * races, range(races)).tolist()), token_words(count, CPU))
    winners = Counter(coarse.argmin(dim=1).tolist())
    assert p_value(winners, dict.fromkeys(range(count), races / count)) > SMALLEST_P_VALUE


def test_seeds_of_continuations_are_the_requests_own_and_others_that_follow_from_it() -> None:
    assert [derived_seed(seed, 0) for seed in (0, 7, MAX_SEED)] == [0, 7, MAX_SEED]
    seeds = [derived_seed(seed, index) for seed in range(50) for index in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    assert buckets(values([(derived_seed(3, index), 0) for index in range(SAMPLES)], 2), 64) > SMALLEST_P_VALUE
