"""Several ranks under random traffic: what one reads is what the others read, and a lost one ends all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from sightline.cache.told import ToldCache
from sightline.core.errors import RankLostError
from sightline.core.pool_rows import PoolRows
from sightline.distributed.orders import Order, StepOrder, unpacked
from sightline.engine.launch import StepLauncher
from sightline.runner import following, roles
from sightline.runner.roles import Led, Teller
from sightline.runner.telling import PartTeller
from sightline.testing.simulator.counts import EventCounts
from sightline.testing.simulator.ranks import FollowersCollectives, LeadersOutputs
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


def _copies_told_to_the_first_replica(patch: pytest.MonkeyPatch) -> None:
    whole = Teller.__init__

    def init(self: Teller, orders: Any, replica: int) -> None:
        del replica
        whole(self, orders, 0)

    patch.setattr(Teller, "__init__", init)


def _outputs_of_replicas_in_another_order(patch: pytest.MonkeyPatch) -> None:
    whole = LeadersOutputs.gather

    def gather(self: LeadersOutputs, part: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        return whole(self, part, sizes, dim).flip(dim)

    patch.setattr(LeadersOutputs, "gather", gather)


def _padding_that_is_written(patch: pytest.MonkeyPatch) -> None:
    whole = PoolRows.padded

    def padded(self: PoolRows, rows: int, tokens: int, slot: int) -> PoolRows:
        del slot
        return whole(self, rows, tokens, 9)

    patch.setattr(PoolRows, "padded", padded)


def _a_row_of_another_replica(patch: pytest.MonkeyPatch) -> None:
    """Rows are launched where they do not belong."""
    whole = StepLauncher._assemble

    def assemble(self: StepLauncher[Any], rows: Sequence[Any], unread: Any) -> Any:
        counts = [row.sequence.replica for row in rows]
        if len(set(counts)) > 1:
            rows[0].sequence.replica, rows[-1].sequence.replica = counts[-1], counts[0]
        try:
            return whole(self, rows, unread)
        finally:
            for row, replica in zip(rows, counts, strict=True):
                row.sequence.replica = replica

    patch.setattr(StepLauncher, "_assemble", assemble)


def _an_account_that_is_not_launched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(roles.Led, "_launch_accounts", lambda self, others: None)


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
    "copies are told to the first replica": (_copies_told_to_the_first_replica, {}),
    "outputs of replicas in another order": (_outputs_of_replicas_in_another_order, {}),
    "padding is written": (_padding_that_is_written, {}),
    "a row of another replica": (_a_row_of_another_replica, {}),
    "an account is not launched": (_an_account_that_is_not_launched, {}),
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
