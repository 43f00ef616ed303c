"""Traffic on a model with a sparse layer, and bugs of its two groups, each of which the simulator finds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from sightline.attention.contract import IndexInputs
from sightline.attention.groups import LayerGroup
from sightline.attention.planner import PlannedBatch, Planner
from sightline.attention.sparse import hot_entries
from sightline.cache.pools import Pool
from sightline.core.batch import Batch
from sightline.core.errors import ConfigError
from sightline.kernels.hot_entries import drop_entries
from sightline.testing.simulator.simulation import play, simulate
from sightline.testing.simulator.sparse_model import _ChoosingPlan, _Row
from sightline.testing.simulator.workload import draw_scenario, draw_scene

STEPS = 60
MOST_SEEDS = 25
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain", marks=pytest.mark.prove),
        pytest.param({"guesses": True}, id="guesses"),
        pytest.param({"states": True, "guesses": True}, id="states", marks=pytest.mark.prove),
        pytest.param({"host": True}, id="host", marks=pytest.mark.prove),
    ],
)
@pytest.mark.parametrize("first", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_traffic_on_a_sparse_model_breaks_nothing(first: int, options: dict[str, bool]) -> None:
    for seed in range(first, first + 5):
        assert simulate(seed, STEPS, sparse=True, **options).forwards > 0


def test_a_sparse_layer_attends_to_a_token_at_least() -> None:
    with pytest.raises(ConfigError, match="expected at least 1 chosen token"):
        msgspec.structs.replace(draw_scene(random.Random(0)), top_k=0)


def _key_pool(pool: Pool) -> bool:
    return "index" in pool.key


def choose_in_stale_pages(patch: pytest.MonkeyPatch) -> None:
    """An indexer reads the pages that a page-table row had first."""
    run, known = _ChoosingPlan.run, dict[int, Tensor]()

    def stale(plan: _ChoosingPlan, layer: int, inputs: IndexInputs, out: Tensor) -> None:
        rows = []
        for number, row in enumerate(plan.rows):
            old = known.setdefault(number, row.slots)
            count = min(len(old), len(row.slots))
            rows.append(row._replace(slots=torch.cat((old[:count], row.slots[count:]))))
        object.__setattr__(plan, "rows", tuple(rows))
        run(plan, layer, inputs, out)

    patch.setattr(_ChoosingPlan, "run", stale)


def keep_no_keys_of_dense_steps(patch: pytest.MonkeyPatch) -> None:
    """A step that is not sparse leaves its keys unwritten."""
    run = _ChoosingPlan.run

    def without(plan: _ChoosingPlan, layer: int, inputs: IndexInputs, out: Tensor) -> None:
        if plan.is_sparse:
            run(plan, layer, inputs, out)

    patch.setattr(_ChoosingPlan, "run", without)


def reverse_the_choice_of_ties(patch: pytest.MonkeyPatch) -> None:
    """The indexer takes the lowest hashes."""
    choice = _Row.choice

    def lowest(row: _Row, entries: Tensor, top_k: int) -> Tensor:
        return choice(row, -entries if entries.shape[1] == 2 and top_k % 2 else entries, top_k)

    run = _ChoosingPlan.run

    def reversed_run(plan: _ChoosingPlan, layer: int, inputs: IndexInputs, out: Tensor) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(_Row, "choice", lowest)
            run(plan, layer, inputs, out)

    patch.setattr(_ChoosingPlan, "run", reversed_run)


def give_the_choice_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    """A step with as many tokens as the one before takes that one's choice."""
    choose, kept = PlannedBatch.choose, dict[int, Tensor]()

    def old(self: PlannedBatch, layer: int, inputs: IndexInputs) -> Tensor | None:
        found = choose(self, layer, inputs)
        if found is None:
            return None
        before = kept.get(len(found), found)
        kept[len(found)] = found.clone()
        return before

    patch.setattr(PlannedBatch, "choose", old)


def choose_for_one_group_alone(patch: pytest.MonkeyPatch) -> None:
    """The planner takes a step as sparse for the indexers one token later than for the layers that read the choice."""
    decide = Planner._sparsity

    def late(self: Planner, group: LayerGroup, batch: Batch) -> Any:
        bounds = zip(batch.context_lens.bound, batch.query_lens.bound, strict=True)
        longest = max((context + new for context, new in bounds), default=0)
        is_at_border = group.chooses and longest == (group.spec.top_k or 0) + 1
        return frozenset() if is_at_border else decide(self, group, batch)

    patch.setattr(Planner, "_sparsity", late)


def copy_no_index_keys(patch: pytest.MonkeyPatch) -> None:
    """Entries that are moved or copied within the cache are left behind in the pool of index keys."""
    for name, original in (("copy_page", Pool.copy_page), ("move_entries", Pool.move_entries)):

        def skipping(pool: Pool, *args: Any, original: Callable[..., None] = original) -> None:
            if not _key_pool(pool):
                original(pool, *args)

        patch.setattr(Pool, name, skipping)


def keep_no_new_entries(patch: pytest.MonkeyPatch) -> None:
    """Entries of several tokens stay on the device, although their pool is in host memory."""
    patch.setattr(hot_entries._HotPlan, "keep", lambda self, layer: None)


def keep_hot_entries_of_other_owners(patch: pytest.MonkeyPatch) -> None:
    """Hot entries are those of the sequence that had the row before."""

    def keeping(held: Tensor, owners: Tensor, rows: Tensor, stamps: Tensor, contexts: Tensor) -> None:
        owners.index_copy_(0, rows, stamps)
        drop_entries(held, owners, rows, stamps, contexts)

    patch.setattr(hot_entries, "drop_entries", keeping)


BUGS: dict[Plant, bool] = {
    choose_in_stale_pages: False,
    keep_no_keys_of_dense_steps: False,
    reverse_the_choice_of_ties: False,
    give_the_choice_of_the_step_before: False,
    choose_for_one_group_alone: False,
    copy_no_index_keys: True,
}
"""Each with whether it takes guesses to show."""


@pytest.mark.parametrize(
    "plant", [keep_no_new_entries, pytest.param(keep_hot_entries_of_other_owners, marks=pytest.mark.prove)]
)
def test_a_planted_bug_of_hot_entries_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found = (play(draw_scenario(seed, STEPS, states=True, sparse=True)) for seed in range(MOST_SEEDS))
    assert next((violation for violation in found if violation is not None), None) is not None, plant.__doc__


@pytest.mark.parametrize(("plant", "guesses"), BUGS.items(), ids=[plant.__name__ for plant in BUGS])
def test_a_planted_bug_of_choices_is_found(plant: Plant, guesses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found = (play(draw_scenario(seed, STEPS, guesses=guesses, sparse=True)) for seed in range(MOST_SEEDS))
    assert next((violation for violation in found if violation is not None), None) is not None, plant.__doc__
