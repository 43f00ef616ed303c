"""Traffic on a model with a recurrent group, and bugs of states planted in it, each of which the simulator finds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec
import pytest

from sightline.attention.contract import RecurrentInputs
from sightline.cache.prefix import PrefixCache, PrefixNode
from sightline.cache.states import StateCheckpoint, StateTable
from sightline.core.errors import ConfigError
from sightline.testing.simulator.scenario import Drafting
from sightline.testing.simulator.simulation import play, simulate
from sightline.testing.simulator.state_model import _SummingPlan
from sightline.testing.simulator.workload import draw_scenario, draw_scene

STEPS = 60
MOST_SEEDS = 25


@pytest.mark.parametrize("guesses", [False, True], ids=["plain", "guesses"])
@pytest.mark.parametrize("first", [pytest.param(0), pytest.param(1000, marks=pytest.mark.slow)])
def test_traffic_on_a_model_with_states_breaks_nothing(first: int, guesses: bool) -> None:
    for seed in range(first, first + 12):
        assert simulate(seed, STEPS, guesses=guesses, states=True).forwards > 0


def test_states_follow_one_text() -> None:
    trees = Drafting(honesty=1.0, most=2, num_branches=2, adapts=False, seed=0)
    scene = draw_scene(random.Random(0))
    with pytest.raises(ConfigError, match="expected a model with states to guess chains"):
        msgspec.structs.replace(scene, async_scheduling=False, max_step_ticks=None, drafting=trees, max_checkpoints=3)


def read_the_slot_of_the_first_row(patch: pytest.MonkeyPatch) -> None:
    """Every row with a context goes on from the state of the first such row."""
    slots_to_read = StateTable.slots_to_read

    def first(table: StateTable, rows: Sequence[int], contexts: Sequence[int]) -> list[int]:
        found = slots_to_read(table, rows, contexts)
        used = next((slot for slot in found if slot), 0)
        return [used if slot else 0 for slot in found]

    patch.setattr(StateTable, "slots_to_read", first)


def read_the_empty_state(patch: pytest.MonkeyPatch) -> None:
    """Rows begin anew in each step."""
    patch.setattr(StateTable, "slots_to_read", lambda table, rows, contexts: [0] * len(rows))


def update_in_place(patch: pytest.MonkeyPatch) -> None:
    """A step leaves the state that it read changed, so that a checkpoint is no longer what it was."""
    run = _SummingPlan.run

    def changed(plan: _SummingPlan, layer: int, inputs: RecurrentInputs, out: object) -> None:
        run(plan, layer, inputs, out)  # type: ignore[arg-type]
        for slot in plan.read_slots:
            if slot:
                plan.states[slot] += 1.0

    patch.setattr(_SummingPlan, "run", changed)


def keep_the_state_of_the_token_before(patch: pytest.MonkeyPatch) -> None:
    """A row keeps the state behind its last token but one."""
    run = _SummingPlan.run

    def earlier(plan: _SummingPlan, layer: int, inputs: RecurrentInputs, out: object) -> None:
        kept = list(plan.kept)
        place = 0
        for count in plan.query_lens:
            if count > 1 and not kept[place + count - 2]:
                kept[place + count - 2], kept[place + count - 1] = kept[place + count - 1], 0
            place += count
        wrong = _SummingPlan(plan.states, plan.read_slots, tuple(kept), plan.query_lens)
        run(wrong, layer, inputs, out)  # type: ignore[arg-type]

    patch.setattr(_SummingPlan, "run", earlier)


def leak_the_states_of_a_closed_row(patch: pytest.MonkeyPatch) -> None:
    """A row that is given back keeps its states."""
    fill = StateTable.fill

    def leaking(table: StateTable, row: int, length: int) -> None:
        if length:
            fill(table, row, length)
        else:
            table._held[row].clear()

    patch.setattr(StateTable, "fill", leaking)


def leak_a_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint outlives its node."""
    patch.setattr(StateTable, "release", lambda table, checkpoint: None)


def go_on_from_the_last_guess(patch: pytest.MonkeyPatch) -> None:
    """Rejected guesses keep their states, and a row goes on from the last of them."""
    slots_to_read = StateTable.slots_to_read

    def last(table: StateTable, rows: Sequence[int], contexts: Sequence[int]) -> list[int]:
        found = slots_to_read(table, rows, contexts)
        held = [table.held(row) for row in rows]
        return [states[max(states)] if slot else 0 for slot, states in zip(found, held, strict=True)]

    patch.setattr(StateTable, "settle", lambda table, row, launched: None)
    patch.setattr(StateTable, "slots_to_read", last)


def restore_without_an_owner(patch: pytest.MonkeyPatch) -> None:
    """A row that goes on from a checkpoint does not become its owner."""

    def restore(table: StateTable, row: int, checkpoint: StateCheckpoint) -> None:
        table._held[row][checkpoint.position] = (checkpoint.slot, checkpoint.generation)

    patch.setattr(StateTable, "restore", restore)


def attach_to_the_parent(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint is attached to the page before its own."""
    attach = PrefixCache.attach

    def misplaced(cache: PrefixCache, node: PrefixNode, checkpoint: StateCheckpoint) -> bool:
        attached = attach(cache, node, checkpoint)
        parent = node.parent
        if attached and parent is not None and parent.parent is not None and parent.checkpoint is None:
            node.checkpoint, parent.checkpoint = None, checkpoint
        return attached

    patch.setattr(PrefixCache, "attach", misplaced)


BUGS: dict[Callable[[pytest.MonkeyPatch], None], bool] = {
    read_the_slot_of_the_first_row: False,
    read_the_empty_state: False,
    update_in_place: False,
    keep_the_state_of_the_token_before: False,
    leak_the_states_of_a_closed_row: False,
    leak_a_checkpoint: False,
    go_on_from_the_last_guess: True,
    restore_without_an_owner: False,
    attach_to_the_parent: False,
}
"""Each with whether it takes guesses to show."""


@pytest.mark.parametrize(("plant", "guesses"), BUGS.items(), ids=[plant.__name__ for plant in BUGS])
def test_a_planted_bug_of_states_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], guesses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = (play(draw_scenario(seed, STEPS, guesses=guesses, states=True)) for seed in range(MOST_SEEDS))
    assert next((violation for violation in found if violation is not None), None) is not None, plant.__doc__
