"""Traffic on an engine that keeps pages in host memory, and bugs planted in it, each of which the simulator finds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest

from sightline.cache.blocks import BlockHash, BlockIdentity, BlockPlace, TransferDone, TransferTicket
from sightline.cache.host import HostBlocks, _HostBlock
from sightline.cache.pools import BundlePages
from sightline.cache.states import StateTable
from sightline.cache.store import CacheStore
from sightline.cache.tier import Leaving, LowerTier, Returning
from sightline.core.errors import ConfigError
from sightline.scheduler.supply import Supply
from sightline.testing.simulator.counts import EventCounts
from sightline.testing.simulator.late_blocks import LateBlocks
from sightline.testing.simulator.scenario import HostScene, Scenario
from sightline.testing.simulator.simulation import play, simulate
from sightline.testing.simulator.workload import draw_scenario

STEPS = 80
MOST_SEEDS = 40


@pytest.mark.parametrize(
    ("seeds", "guesses", "states"),
    [
        pytest.param(range(18, 19), False, False, id="plain"),
        pytest.param(range(1000, 1024), False, False, id="many", marks=pytest.mark.prove),
        pytest.param(range(2000, 2024), True, True, id="guesses and states", marks=pytest.mark.prove),
    ],
)
def test_traffic_with_a_host_tier_breaks_nothing(seeds: range, guesses: bool, states: bool) -> None:
    total = EventCounts()
    for seed in seeds:
        total += simulate(seed, STEPS, guesses=guesses, states=states, host=True)
    assert total.offloaded_blocks > 0
    assert total.returned_blocks > 0
    assert total.late_transfers > 0
    assert total.failed_transfers > 0


def test_the_same_seed_repeats_a_run_with_a_host_tier() -> None:
    assert simulate(3, 40, host=True) == simulate(3, 40, host=True)


def test_a_scenario_with_a_host_tier_survives_json() -> None:
    scenario = draw_scenario(5, 20, host=True)
    assert scenario.scene.host is not None
    assert Scenario.from_json(scenario.to_json()) == scenario


@pytest.mark.parametrize(
    "wrong", [{"num_blocks": 0}, {"lateness": 1.0}, {"failures": 1.5}], ids=["blocks", "lateness", "failures"]
)
def test_a_host_tier_that_could_not_work_is_refused(wrong: dict[str, float]) -> None:
    right = HostScene(num_blocks=1, lateness=0.0, failures=0.0, seed=0)
    with pytest.raises(ConfigError, match="expected a block, a lateness"):
        msgspec.structs.replace(right, **wrong)


def free_a_page_while_it_is_put(patch: pytest.MonkeyPatch) -> None:
    """Evicted pages are handed out before host memory has them."""

    def put(tier: LowerTier, leaving: Sequence[Leaving]) -> None:
        if leaving:
            places = [BlockPlace(block.bundle.pages) for block in leaving]
            tier._blocks.put([block.name for block in leaving], places)

    patch.setattr(LowerTier, "put", put)


def drop_a_dirty_page(patch: pytest.MonkeyPatch) -> None:
    """Host memory says that it has a block that was never copied there."""

    def put(blocks: HostBlocks, wanted: Sequence[tuple[BlockHash, BlockPlace]]) -> None:
        for each, place in wanted:
            blocks._made_room(each, with_state=place.state is not None)

    patch.setattr(HostBlocks, "_put", put)


def read_without_a_fetch(patch: pytest.MonkeyPatch) -> None:
    """A prefix that is only in host memory is taken for one in the pools."""
    patch.setattr(HostBlocks, "_fetch", lambda blocks, found, into: None)


def forget_the_tenant(patch: pytest.MonkeyPatch) -> None:
    """Blocks have the same name for every tenant."""
    beginning = BlockIdentity.beginning
    patch.setattr(BlockIdentity, "beginning", lambda identity, namespace: beginning(identity, ""))


def return_into_the_pages_of_another_row(patch: pytest.MonkeyPatch) -> None:
    """Blocks are copied into pages that another row has."""
    fetch = LowerTier.fetch

    def elsewhere(tier: LowerTier, row: int, first: int, names: Sequence[BlockHash]) -> Returning:
        store = tier._store
        others = [other for other in range(1, store.limits.max_rows + 1) if other != row and store.row_pages(other)]
        if not others:
            return fetch(tier, row, first, names)
        stolen = store.pages_at(others[0], 0)
        inner = tier._blocks.fetch
        patch.setattr(
            LateBlocks,
            "fetch",
            lambda blocks, hashes, into: inner(hashes, [BlockPlace(stolen, into[0].state), *into[1:]]),
        )
        try:
            return fetch(tier, row, first, names)
        finally:
            patch.setattr(LateBlocks, "fetch", whole)

    whole = LateBlocks.fetch
    patch.setattr(LowerTier, "fetch", elsewhere)


def return_the_state_of_another_position(patch: pytest.MonkeyPatch) -> None:
    """A block comes back with the state of another block."""
    fetch = HostBlocks._fetch

    def mixed(blocks: HostBlocks, found: Sequence[_HostBlock], into: Sequence[BlockPlace]) -> None:
        states = [blocks._held[each].state for each in blocks._with_state]
        wrong = [
            replace(block, state=next((state for state in states if state != block.state), block.state))
            for block in found
        ]
        fetch(blocks, wrong, into)

    patch.setattr(HostBlocks, "_fetch", mixed)


def run_before_the_blocks_are_there(patch: pytest.MonkeyPatch) -> None:
    """A row that waits for its blocks is told at once that they have come."""
    fetch = Supply.fetch

    def hasty(supply: Supply, sequence: object, reuse: object) -> None:
        fetch(supply, sequence, reuse)  # type: ignore[arg-type]
        returning = sequence.returning  # type: ignore[attr-defined]
        if returning is not None and supply.store.returned(returning.row, returning.num_tokens, returning.state):
            sequence.num_computed = sequence.num_scheduled = returning.num_tokens  # type: ignore[attr-defined]
            sequence.returning = None  # type: ignore[attr-defined]

    patch.setattr(Supply, "fetch", hasty)


def take_a_failed_fetch_for_done(patch: pytest.MonkeyPatch) -> None:
    """Blocks that did not come are read."""
    poll = LowerTier.poll
    patch.setattr(LowerTier, "poll", lambda tier: [(each, None) for each, _ in poll(tier)])


def free_a_page_while_it_is_fetched(patch: pytest.MonkeyPatch) -> None:
    """A page that a fetch fills belongs to its row alone, so that it is handed out when the row is cancelled."""

    def hold(store: CacheStore, row: int, first: int, stop: int) -> tuple[BundlePages, ...]:
        return tuple([store.pages_at(row, index) for index in range(first, stop)])

    patch.setattr(CacheStore, "hold_pages", hold)
    patch.setattr(CacheStore, "drop_pages", lambda store, pages: None)


def leak_what_was_put(patch: pytest.MonkeyPatch) -> None:
    """Pages stay with the tier after host memory has them."""
    patch.setattr(LowerTier, "_free", lambda tier, blocks: None)


def leak_a_state_that_did_not_come(patch: pytest.MonkeyPatch) -> None:
    """The slot of a state whose fetch has ended keeps its second owner."""
    patch.setattr(StateTable, "let_go", lambda table, row, position, slot: None)


def keep_waiting_after_a_failure(patch: pytest.MonkeyPatch) -> None:
    """A row whose blocks did not come waits for them for ever."""
    poll = LateBlocks.poll

    def successes(blocks: LateBlocks) -> list[tuple[TransferTicket, object]]:
        return [(ticket, end) for ticket, end in poll(blocks) if end == TransferDone()]

    patch.setattr(LateBlocks, "poll", successes)


BUGS: dict[Callable[[pytest.MonkeyPatch], None], tuple[bool, str]] = {
    free_a_page_while_it_is_put: (False, "hold other entries|is not the request's own"),
    drop_a_dirty_page: (False, "hold other entries|is not the request's own|failed that should not"),
    read_without_a_fetch: (False, "hold other entries|is not the request's own|failed that should not"),
    forget_the_tenant: (False, "that no request of .* had left"),
    return_into_the_pages_of_another_row: (False, "hold other entries|is not the request's own|failed that should not"),
    return_the_state_of_another_position: (True, "is not the request's own|failed that should not"),
    run_before_the_blocks_are_there: (False, "hold other entries|is not the request's own|failed that should not"),
    take_a_failed_fetch_for_done: (False, "hold other entries|is not the request's own|failed that should not"),
    free_a_page_while_it_is_fetched: (False, "hold other entries|other owners|is not the request's own"),
    leak_what_was_put: (False, "other owners"),
    leak_a_state_that_did_not_come: (True, "state slot .* has .* owners"),
    keep_waiting_after_a_failure: (False, "never end"),
}
"""Bugs, whether they need a model with states, and what the simulator says."""


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
@pytest.mark.prove
def test_a_planted_bug_of_the_host_tier_is_found(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    states, said = BUGS[plant]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        found = (play(draw_scenario(seed, STEPS, states=states, host=True)) for seed in range(MOST_SEEDS))
        violation = next((each for each in found if each is not None), None)
    assert violation is not None, f"{plant.__name__} was not found in {MOST_SEEDS} seeds"
    assert re.search(said, str(violation)), str(violation)
