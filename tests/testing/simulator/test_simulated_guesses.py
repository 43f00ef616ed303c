"""Drafters that lie at random change no answer and break no invariant: 7,500 steps.

`pytest -m slow tests/testing/simulator/test_simulated_guesses.py` plays 92,500 more.

Chains and trees, with drafts of any size down to none, guesses that are all right, all wrong or right up to the end of
a page, while rows give way, requests are cancelled and paused, prompts are forked and prefixes shared.

In classes, so that the processes that run the tests can share them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import ClassVar

import msgspec
import pytest
from _pytest.mark.structures import ParameterSet

from sightline.cache.store import NetworkCache
from sightline.core.batch import RowMask
from sightline.core.errors import ConfigError
from sightline.engine import launch, sampled
from sightline.scheduler.scheduler import Scheduler
from sightline.scheduler.sequence import Draft, DraftRoom, RowResult, ScheduledRow, SequenceState
from sightline.speculative.verification import right_guesses, tree_mask
from sightline.testing.simulator.counts import EventCounts
from sightline.testing.simulator.liars import LyingDrafter
from sightline.testing.simulator.oracle import NUM_ORDINARY, likeliest, prefix_hashes
from sightline.testing.simulator.scenario import Drafting, Scenario
from sightline.testing.simulator.simulation import play as play_scenario
from sightline.testing.simulator.simulation import simulate
from sightline.testing.simulator.workload import draw_scenario
from support.scheduling import make_sequence

CHUNKS = 10
"""Per class; the first `PROVEN_CHUNKS` of the first class in `make prove`."""
PROVEN_CHUNKS = 3
CHUNK_STEPS = 2_500
TRAFFIC_STEPS = 100
RARE = {"device_faults", "closes", "shared_rows", "ended_in_flight", "spoilt_rows"}
"""About once a seed at most, or only where steps overlap."""
HOST = {"offloaded_blocks", "returned_blocks", "late_transfers", "failed_transfers"}
"""Events of engines with a host tier."""


def play(first_seed: int, num_steps: int) -> EventCounts:
    seed, total = first_seed, EventCounts()
    while total.steps < num_steps:
        total += simulate(seed, TRAFFIC_STEPS, guesses=True)
        seed += 1
    return total


def seldom_chunks() -> list[ParameterSet]:
    """Every chunk; those that are not proven run only if slow tests are asked for."""
    return [pytest.param(chunk, marks=pytest.mark.slow if chunk >= PROVEN_CHUNKS else ()) for chunk in range(CHUNKS)]


class _Guesses:
    first: ClassVar[int]

    @pytest.mark.parametrize("chunk", seldom_chunks())
    def test_guesses_break_nothing(self, chunk: int) -> None:
        """Forty times: 100,000 steps in all."""
        total = play(self.first + 1_000 * chunk, CHUNK_STEPS)
        idle = {field.name for field, value in zip(fields(total), total.values(), strict=True) if value < 5}
        assert idle <= RARE | HOST
        assert min(total.trees, total.wrong_drafts, total.whole_drafts, total.border_drafts) > 30


class TestFirstQuarter(_Guesses):
    first = 100_000


@pytest.mark.slow
class TestSecondQuarter(_Guesses):
    first = 110_000


@pytest.mark.slow
class TestThirdQuarter(_Guesses):
    first = 120_000


@pytest.mark.slow
class TestLastQuarter(_Guesses):
    first = 130_000


def test_the_same_traffic_comes_to_an_engine_that_guesses() -> None:
    plain, guessing = (draw_scenario(3, 50, guesses=guesses) for guesses in (False, True))
    assert [type(event) for event in plain.events] == [type(event) for event in guessing.events]
    assert plain.scene.drafting is None
    assert guessing.scene.drafting is not None
    assert Scenario.from_json(guessing.to_json()) == guessing


def test_drafting_that_cannot_be_is_refused() -> None:
    scene = draw_scenario(3, 5, guesses=True).scene
    with pytest.raises(ConfigError, match="expected drafting without async_scheduling"):
        msgspec.structs.replace(scene, async_scheduling=True)
    with pytest.raises(ConfigError, match="expected an honesty from 0 to 1"):
        Drafting(honesty=1.5, most=1, num_branches=1, adapts=False, seed=0)


def test_the_truth_of_liars_is_what_the_model_generates() -> None:
    tokens = [3, 1, 4]
    for token in likeliest(tokens, 6):
        assert token == list(prefix_hashes(tokens))[-1] % NUM_ORDINARY
        tokens.append(token)


@pytest.mark.parametrize("num_branches", [1, 3])
def test_a_liar_guesses_as_the_scene_says(num_branches: int) -> None:
    truth = list(range(20))

    def drafts(honesty: float) -> Sequence[Draft]:
        drafting = Drafting(honesty=honesty, most=6, num_branches=num_branches, adapts=False, seed=1)
        drafter = LyingDrafter(lambda _, count: truth[:count], drafting, 1_000)
        return drafter.propose([DraftRoom(make_sequence("a", 3, 9), 6)] * 200)

    assert all(draft.tokens == tuple(truth[: len(draft.tokens)]) for draft in drafts(1.0))
    lies = drafts(0.0)
    assert {len(draft.tokens) for draft in lies} == set(range(7))
    assert sum(draft.tokens[:1] == (0,) for draft in lies) < 5
    assert all((draft.parents is None) == (num_branches == 1) for draft in lies)


def entry_of_a_sibling(patch: pytest.MonkeyPatch) -> None:
    keep = NetworkCache.keep

    def stay(self: NetworkCache, row: int, context_len: int, places: Sequence[int]) -> None:
        keep(self, row, context_len, range(len(places)))

    patch.setattr(NetworkCache, "keep", stay)


def positions_of_a_chain(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(launch, "tree_positions", lambda row: list(range(row.context_len, row.seq_len)))


def mask_of_other_parents(patch: pytest.MonkeyPatch) -> None:
    def shifted(row: ScheduledRow) -> RowMask:
        return tree_mask(replace(row, parents=tuple(max(-1, parent - 1) for parent in row.draft_parents)))

    patch.setattr(launch, "tree_mask", shifted)


def wrong_guess_kept(patch: pytest.MonkeyPatch) -> None:
    def generous(row: ScheduledRow, chosen: Sequence[int]) -> Sequence[int]:
        found = right_guesses(row, chosen)
        return range(len(found) + 1) if row.parents is None and len(found) < len(row.drafts) else found

    patch.setattr(sampled, "right_guesses", generous)


def rejected_entries_committed(patch: pytest.MonkeyPatch) -> None:
    commit = Scheduler.commit

    def whole(self: Scheduler, row: ScheduledRow, result: RowResult) -> None:
        commit(self, row, result)
        sequence: SequenceState = row.sequence
        if row.parents is None and row.drafts:
            sequence.num_computed = min(row.seq_len, len(sequence.tokens) - 1 + (result.seq_len < row.seq_len))

    patch.setattr(Scheduler, "commit", whole)


@pytest.mark.parametrize(
    "plant",
    [entry_of_a_sibling, positions_of_a_chain, mask_of_other_parents, wrong_guess_kept, rejected_entries_committed],
    ids=lambda plant: plant.__name__,
)
def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch, plant: object) -> None:
    assert callable(plant)
    plant(monkeypatch)
    scenarios = [draw_scenario(seed, 60, guesses=True) for seed in range(500_000, 500_030)]
    assert any(found is not None for found in map(play_scenario, scenarios))
