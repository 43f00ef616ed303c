"""Where processes stand, and what they exchange with whom."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sightline.distributed.collectives import LONE, NO_LINKS, Links
from sightline.distributed.ranks import Division, Place, Rank
from support.rank_threads import of_ranks


def test_ranks_stand_in_a_grid() -> None:
    places = [Place(Rank(index, 6), 3) for index in range(6)]
    assert [(each.replica.index, each.within.index) for each in places] == [
        *((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1))
    ]
    assert {(each.replica.size, each.within.size) for each in places} == {(3, 2)}


@pytest.mark.parametrize("num_replicas", [0, 4, 5])
def test_replicas_have_equal_sizes(num_replicas: int) -> None:
    with pytest.raises(ValueError, match="replicas of equal size"):
        Place(Rank(0, 6), num_replicas)


def test_experts_are_divided_among_all_ranks_if_replicas_join_them() -> None:
    place = Place(Rank(3, 4), 2)
    assert place.division(joins_experts=True) == Division(Rank(1, 2), Rank(3, 4))
    assert place.division(joins_experts=False) == Division(Rank(1, 2), Rank(1, 2))


def test_each_group_has_its_members() -> None:
    def sums(links: Links) -> list[float]:
        own = float(10**links.place.rank.index)
        found = []
        for group in (links.everyone, links.within, links.across):
            x = torch.tensor([own])
            group.sum(x)
            found.append(x.item())
        return found

    assert of_ranks(4, sums, num_replicas=2) == [
        [1111.0, 11.0, 101.0],
        [1111.0, 11.0, 1010.0],
        [1111.0, 1100.0, 101.0],
        [1111.0, 1100.0, 1010.0],
    ]


@pytest.mark.parametrize(("num_replicas", "alone"), [(1, "across"), (3, "within")])
def test_a_group_of_one_exchanges_nothing(num_replicas: int, alone: str) -> None:
    assert all(of_ranks(3, lambda links: vars(links)[alone] is LONE, num_replicas))


def test_rows_are_stacked_and_their_sums_given_back() -> None:
    def exchange(links: Links) -> tuple[Tensor, Tensor]:
        own = torch.full((2, 3), float(links.place.rank.index))
        rows, back = torch.empty(6, 3), torch.empty(2, 3)
        links.everyone.stack(own, rows)
        links.everyone.sum_of_part(rows * (1 + links.place.rank.index), back)
        return rows, back

    for index, (rows, back) in enumerate(of_ranks(3, exchange)):
        assert rows[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        assert set(back.flatten().tolist()) == {6.0 * index}


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_different_sizes_are_joined_in_order(dim: int) -> None:
    sizes = [2, 0, 3]

    def join(links: Links) -> Tensor:
        index = links.place.rank.index
        shape = [4, 4]
        shape[dim] = sizes[index]
        return links.everyone.gather(torch.full(shape, float(index)), sizes, dim)

    for joined in of_ranks(3, join):
        assert joined.shape[dim] == 5
        assert joined.select(1 - dim, 0).tolist() == [0.0, 0.0, 2.0, 2.0, 2.0]


def test_a_process_alone_exchanges_with_itself() -> None:
    x, out = torch.arange(6.0).view(2, 3), torch.empty(2, 3)
    NO_LINKS.across.stack(x, out)
    assert torch.equal(out, x)
    NO_LINKS.within.sum_of_part(x + 1, out)
    assert torch.equal(out, x + 1)
    assert torch.equal(NO_LINKS.everyone.gather(x, [2], dim=0), x)
