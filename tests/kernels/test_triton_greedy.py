"""The greedy choice in one launch equals that of torch and of numpy, in Triton's interpreter or on the card."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from sightline.kernels import greedy
from sightline.kernels.triton import greedy as triton_greedy
from support.extend_cases import DEVICE

BLOCKS = [1, 2, 7, 512, 513, 8191, 8192, 8193, 20_000]
"""Sizes of a vocabulary around those that a program reads at once."""
NOT_FINITE = [torch.nan, torch.inf, -torch.inf]


def chosen(logits: Tensor) -> list[list[int]]:
    """What both implementations give, with room beside it that they must not touch."""
    results = []
    for best in (greedy.best_tokens, triton_greedy.best_tokens):
        room = torch.full((4, len(logits)), -7, dtype=torch.int64, device=DEVICE)
        best(logits.to(DEVICE), room[1:3])
        assert (room[::3] == -7).all()
        results.append(room[1:3].tolist())
    assert results[0] == results[1]
    return results[1]


def normal(rows: int, size: int) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", BLOCKS)
def test_the_likeliest_token_is_chosen(size: int) -> None:
    logits = normal(4, size)
    logits[2, -1] = 9.0
    logits[3] -= 50.0
    assert chosen(logits) == [logits.numpy().argmax(-1).tolist(), [1] * 4]


@pytest.mark.parametrize("size", BLOCKS)
def test_the_lowest_id_of_equals_is_chosen(size: int) -> None:
    logits = normal(6, size).round().clamp(-1, 1)
    logits[1] = 0.0
    logits[2] = -3.4e38
    # The largest logit occurs in two blocks, first in a later lane.
    logits[3, [size // 3, size - 1]] = 5.0
    logits[4] = torch.where(torch.arange(size) % 2 == 0, -0.0, 0.0)
    assert chosen(logits) == [logits.numpy().argmax(-1).tolist(), [1] * 6]


@pytest.mark.parametrize("bad", NOT_FINITE, ids=str)
@pytest.mark.parametrize("size", [2, 513, 8193])
def test_one_logit_that_is_not_finite_marks_its_row_alone(bad: float, size: int) -> None:
    logits = normal(8, size)
    for row, place in ((1, 0), (3, size // 2), (5, size - 1)):
        logits[row, place] = bad
    tokens, finite = chosen(logits)
    assert finite == [1, 0, 1, 0, 1, 0, 1, 1]
    assert tokens == logits.numpy().argmax(-1).tolist()


@pytest.mark.parametrize("bad", NOT_FINITE, ids=str)
def test_a_row_without_a_number_chooses_a_token_that_exists(bad: float) -> None:
    assert chosen(torch.full((2, 8200), bad)) == [[0, 0], [0, 0]]


def test_nan_counts_as_the_largest_whatever_its_sign() -> None:
    logits = normal(3, 700)
    logits[0, [30, 600]] = torch.nan
    logits[1, 30], logits[1, 600] = torch.inf, torch.nan
    logits[2, 30] = torch.from_numpy(numpy.array([-4_194_304], dtype=numpy.int32).view(numpy.float32))[0]
    assert logits[2, 30].isnan()
    assert chosen(logits) == [[30, 600, 30], [0, 0, 0]]


def test_the_largest_finite_logits_are_finite() -> None:
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor([[1.0, largest], [-largest, largest], [-largest, -largest], [1e-45, 0.0]])
    assert chosen(logits) == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_rows_may_be_strided_and_there_may_be_none() -> None:
    logits = normal(6, 40)
    whole = logits.clone()
    part = whole[::2, 3:33]
    whole[:, :3], whole[:, 33:], whole[1::2] = 99.0, torch.nan, torch.nan
    assert chosen(part) == [part.numpy().argmax(-1).tolist(), [1] * 3]
    assert chosen(logits[:0]) == [[], []]
