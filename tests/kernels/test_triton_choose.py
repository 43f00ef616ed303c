"""The choice of the highest scores equals the oracle's, number by number, over any number of levels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sightline.attention.oracle.index import choose_tokens
from sightline.kernels.choice import choose_highest
from sightline.kernels.triton.choose import ChoiceConfig, ChoiceRoom, choose_places
from support.case_marks import routine

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Case:
    counts: tuple[int, ...]
    top_k: int
    at_once: int
    """A program chooses from so many; a segment has half of them."""
    fill: Callable[[int, int], Tensor]
    most: int = 0

    def run(self) -> tuple[Tensor, Tensor]:
        """What was chosen, and what the oracle chooses."""
        queries, most = len(self.counts), max(*self.counts, self.most)
        scores = self.fill(queries, most)
        expected = torch.full((queries, self.top_k), -1, dtype=torch.int32)
        for query, count in enumerate(self.counts):
            seen = scores[query : query + 1, :count]
            expected[query] = choose_tokens(seen.nan_to_num(nan=INF, posinf=INF, neginf=-INF), seen == seen, self.top_k)
            if seen.isnan().any():
                choose_highest(seen, expected[query : query + 1])
            scores[query, count:] = NAN
        config = ChoiceConfig(self.top_k, most, self.at_once, self.at_once, self.at_once // 2, self.at_once)
        room = ChoiceRoom.of(
            config, queries + 1, lambda _, shape: torch.full(shape, 7, dtype=torch.int32, device=DEVICE)
        )
        # Queries are tokens in another order, with one that is none between them.
        tokens = torch.tensor([*reversed(range(queries)), -1], dtype=torch.int32, device=DEVICE)
        counts = torch.tensor([*self.counts, 3], dtype=torch.int32, device=DEVICE)
        out = torch.full((queries + 2, self.top_k), 5, dtype=torch.int32, device=DEVICE)
        padded = torch.cat((scores, torch.zeros(1, most))).to(DEVICE)
        choose_places(padded, tokens, counts, room, out, config)
        assert (out[queries:] == 5).all(), "a token without a query was written"
        return out[:queries].flip(0).cpu(), expected


def drawn(queries: int, most: int) -> Tensor:
    return torch.randn(queries, most)


def tied(queries: int, most: int) -> Tensor:
    return torch.randint(0, 3, (queries, most)).float()


def misleading(queries: int, most: int) -> Tensor:
    """The highest scores are where no sample of every second, fourth or eighth looks."""
    return torch.randn(queries, most) + 10.0 * (torch.arange(most) % 8 == 5)


def only_sampled(queries: int, most: int) -> Tensor:
    """The highest scores are where a sample of every second, fourth or eighth looks."""
    return torch.randn(queries, most) + 10.0 * (torch.arange(most) % 8 == 0)


def late(queries: int, most: int) -> Tensor:
    """The highest scores are the last ones, as in texts whose end matters most."""
    return torch.randn(queries, most) + 0.5 * torch.arange(most)


def alike(queries: int, most: int) -> Tensor:
    return torch.zeros(queries, most)


def both_zeros(queries: int, most: int) -> Tensor:
    return torch.where(torch.rand(queries, most) < 0.5, 0.0, -0.0) * torch.randint(0, 2, (queries, most))


def all_signs(queries: int, most: int) -> Tensor:
    values = torch.tensor([-INF, -3e38, -1.5, -1e-40, -0.0, 0.0, 1e-40, 1.5, 3e38, INF])
    return values[torch.randint(0, 10, (queries, most))]


def some_nan(queries: int, most: int) -> Tensor:
    return torch.where(torch.rand(queries, most) < 0.1, NAN, torch.randn(queries, most))


CASES = {
    "below, at and above": Case((3, 5, 6, 40), 5, 64, drawn),
    "ties": Case((5, 33, 40), 6, 64, tied),
    "all alike": Case((40, 3, 100), 4, 8, alike),
    "zeros of both signs": Case((40, 9, 100), 6, 16, both_zeros),
    "all signs": Case((64, 31, 100), 7, 16, all_signs),
    "not a number": Case((64, 5, 90), 7, 16, some_nan),
    "both zeros and NaN": Case((30, 5), 7, 32, lambda *shape: some_nan(*shape).where(drawn(*shape) > 0, -0.0)),
    "more than a program holds": Case((16, 33, 47, 700), 3, 32, drawn),
    "ties among more than a program holds": Case((16, 17, 90, 127, 128), 7, 16, tied),
    "most places are not reached": Case((3, 16), 7, 16, drawn, most=400),
    "whole segments": Case((64, 128, 512), 8, 32, drawn),
    "as many as a program holds": Case((32, 33, 8), 8, 32, drawn),
    "a sample that misses the best": Case((300, 512), 9, 64, misleading),
    "a sample of the best alone": Case((300, 512), 9, 64, only_sampled),
    "the best at the end": Case((300, 511), 9, 64, late),
    "more wanted than a program holds": Case((100, 20), 24, 16, drawn),
}


@pytest.mark.parametrize(
    "case",
    routine(
        CASES,
        "below, at and above",
        "ties",
        "more than a program holds",
        "both zeros and NaN",
        "a sample that misses the best",
    ),
)
def test_the_choice_is_the_oracles(case: Case) -> None:
    torch.manual_seed(0)
    chosen, expected = case.run()
    assert torch.equal(chosen, expected)


def test_room_is_bounded_by_what_is_chosen() -> None:
    assert ChoiceConfig.of(2048, 8192).is_direct
    long = ChoiceConfig.of(2048, 131_072)
    assert (long.is_direct, long.capacity, long.segments, long.sample) == (False, 4096, 64, 8192)
    assert ChoiceConfig.of(2048, 1 << 20).capacity == 8192
    assert ChoiceConfig.of(20_000, 131_072).capacity == 8192


def test_without_room_a_long_choice_is_refused() -> None:
    scores, numbers = torch.zeros(1, 100, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(1, 4, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="expected room to choose among 100 keys, got none"):
        choose_places(scores, numbers, numbers + 100, None, out, ChoiceConfig(4, 100, 16, 16, 8, 16))
