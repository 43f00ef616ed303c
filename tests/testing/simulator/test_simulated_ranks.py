"""Several ranks under random traffic: what one reads is what the others read, and a lost one ends all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from sightline.cache.told import ToldCache
from sightline.core.errors import RankLostError
from sightline.distributed.orders import Order, StepOrder, unpacked
from sightline.runner import following
from sightline.runner.roles import Led, Teller
from sightline.runner.telling import PartTeller
from sightline.testing.simulator.counts import EventCounts
from sightline.testing.simulator.ranks import FollowersCollectives
from sightline.testing.simulator.simulation import Violation, simulate

SEEDS, STEPS = range(12), 80
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    "kinds",
    [{}, {"guesses": True}, {"states": True}, {"sparse": True}, {"guesses": True, "states": True}],
    ids=lambda kinds: "+".join(kinds) or "plain",
)
def test_ranks_read_alike(kinds: dict[str, bool]) -> None:
    total = EventCounts()
    for seed in SEEDS:
        total += simulate(seed, STEPS, ranks=True, **kinds)
    assert total.forks
    assert total.cached_tokens
    assert total.finished
    assert total.device_faults >= 3, "ranks that are lost"


def test_a_run_repeats_exactly() -> None:
    assert simulate(3, 60, ranks=True) == simulate(3, 60, ranks=True)


def _no_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Teller, "copies_page", lambda self, pool, source, target, num_tokens: None)


def _no_moves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Teller, "moves_entries", lambda self, pool, sources, targets: None)


def _a_page_less(patch: pytest.MonkeyPatch) -> None:
    whole = ToldCache.put_pages

    def put_pages(self: ToldCache, pool: int, row: int, first: int, pages: Sequence[int]) -> None:
        whole(self, pool, row, first, pages[:-1] if len(pages) > 1 else pages)

    patch.setattr(ToldCache, "put_pages", put_pages)


def _pages_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """Each rank reads what it wrote, until rows share pages."""
    whole = ToldCache.put_pages

    def put_pages(self: ToldCache, pool: int, row: int, first: int, pages: Sequence[int]) -> None:
        whole(self, pool, row, first, list(reversed(pages)))

    patch.setattr(ToldCache, "put_pages", put_pages)


def _the_state_of_another_slot(patch: pytest.MonkeyPatch) -> None:
    whole = PartTeller._states

    def states(self: PartTeller, batch: Any) -> Any:
        found = whole(self, batch)
        reads = [each.read for each in found]
        return [
            type(each)(read, each.positions, each.slots)
            for each, read in zip(found, reads[1:] + reads[:1], strict=True)
        ]

    patch.setattr(PartTeller, "_states", states)


def _tokens_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    last: dict[int, Tensor] = {}

    def broadcast(self: FollowersCollectives, x: Tensor) -> None:
        given = self._tokens.popleft()
        x.copy_(last.get(len(given), given))
        last[len(given)] = given

    patch.setattr(FollowersCollectives, "broadcast", broadcast)


def _a_stale_order(patch: pytest.MonkeyPatch) -> None:
    steps = list[StepOrder]()

    def stale(message: bytes, number: int) -> Order:
        order = unpacked(message, number)
        if isinstance(order, StepOrder):
            steps.append(order)
            if len(steps) % 7 == 0 and [len(part.rows) for part in steps[-2].parts] == [
                len(part.rows) for part in order.parts
            ]:
                return steps[-2]
        return order

    patch.setattr(following, "unpacked", stale)


def _a_row_with_a_shorter_context(patch: pytest.MonkeyPatch) -> None:
    whole = ToldCache.begin_row

    def begin_row(self: ToldCache, row: int, context_len: int, told: Any) -> None:
        whole(self, row, max(0, context_len - (row == 1)), told)

    patch.setattr(ToldCache, "begin_row", begin_row)


def _a_lost_rank_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """The step goes on as if it had taken part, and requests end well."""
    whole = Led.along

    def along(self: Led, *given: Any, **others: Any) -> Any:
        try:
            with whole(self, *given, **others):
                yield
        except RankLostError:
            yield

    patch.setattr(Led, "along", contextmanager(along))


FAULTS: dict[str, tuple[Plant, dict[str, bool]]] = {
    "copies are not told": (_no_copies, {}),
    "moves are not told": (_no_moves, {"guesses": True}),
    "a page is not told": (_a_page_less, {}),
    "pages in another order": (_pages_in_another_order, {}),
    "the state of another slot": (_the_state_of_another_slot, {"states": True}),
    "the tokens of the step before": (_tokens_of_the_step_before, {}),
    "a stale order": (_a_stale_order, {}),
    "a context that is too short": (_a_row_with_a_shorter_context, {}),
    "a lost rank is not noticed": (_a_lost_rank_is_not_noticed, {}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_bug_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, kinds = FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises(Violation):
        _play_many(kinds)


def _play_many(kinds: dict[str, bool]) -> None:
    for seed in range(40):
        simulate(seed, STEPS, ranks=True, **kinds)
