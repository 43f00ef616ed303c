"""Choices grouped by expert, in Triton's interpreter or on the card."""

from __future__ import annotations

import pytest
import torch

from support.expert_cases import check_groups, grouped


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(
    ("num_tokens", "per_token", "num_experts"),
    [(1, 1, 1), (1, 6, 24), (3, 2, 5), (17, 3, 8), (130, 5, 6), pytest.param(40, 8, 128, marks=pytest.mark.prove)],
)
def test_the_order_is_stable_and_tiles_cover_each_expert(
    num_tokens: int, per_token: int, num_experts: int, rows: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    check_groups(torch.rand(num_tokens, num_experts, generator=generator).topk(per_token).indices, num_experts, rows)


@pytest.mark.parametrize("expert", [0, 3, 6])
@pytest.mark.parametrize("num_tokens", [1, 16, 33])
def test_one_expert_takes_all_choices(expert: int, num_tokens: int) -> None:
    check_groups(torch.full((num_tokens, 1), expert), 7, 16)


def test_no_choice_is_dropped_at_either_bound() -> None:
    """Each expert's last tile holds one place only, which is where tables that are too short end."""
    check_groups(torch.arange(5).repeat_interleave(17).view(-1, 1), 5, 16)
    check_groups(torch.arange(5).repeat_interleave(16).view(-1, 1), 5, 16)
    check_groups(torch.arange(20).view(-1, 1), 20, 16)


def test_more_choices_than_a_program_reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sightline.kernels.triton.expert_groups._MOST_AT_ONCE", 32)
    generator = torch.Generator().manual_seed(1)
    check_groups(torch.randint(0, 6, (75, 1), generator=generator), 6, 16)


def test_nothing_is_grouped_without_choices() -> None:
    order, tiles = grouped(torch.empty(0, 4, dtype=torch.int64), 8, 16)
    assert order.shape == (0,)
    assert tiles.shape == (0, 3)
