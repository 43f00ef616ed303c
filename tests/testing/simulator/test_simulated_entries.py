"""Bugs of entries that stand for several tokens, planted in the store and in the simulated layer that keeps some, each
of which the simulator finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from torch import Tensor

from sightline.attention.compressed.inputs import CompressedInputs
from sightline.cache.pools import Pool
from sightline.core.batch import PADDING_SLOT
from sightline.testing.simulator import compressed_model
from sightline.testing.simulator.compressed_model import _AddingPlan
from sightline.testing.simulator.simulation import play
from sightline.testing.simulator.workload import draw_scenario

pytestmark = pytest.mark.prove
STEPS = 60
MOST_SEEDS = 25


def keep_entries_of_refused_guesses(patch: pytest.MonkeyPatch) -> None:
    """An entry that a refused guess completed is not written again."""
    run = _AddingPlan.run

    def kept(plan: _AddingPlan, layer: int, inputs: CompressedInputs, out: Tensor) -> None:
        before = plan.planes.entries.copy()
        run(plan, layer, inputs, out)
        for row in plan.rows:
            for slot in row.slots[row.context // plan.ratio :]:
                if np.isfinite(before[slot]).all():
                    plan.planes.entries[slot] = before[slot]

    patch.setattr(_AddingPlan, "run", kept)


def see_an_entry_early(patch: pytest.MonkeyPatch) -> None:
    """The entry of the open window is read too, if an earlier token completed it once."""
    run = _AddingPlan._run_row

    def early(plan: _AddingPlan, row: compressed_model._Row, *rest: Sequence[float]) -> None:
        shift = int(row.context % plan.ratio == plan.ratio - 1 and len(row.slots) > row.context // plan.ratio)
        run(plan, row._replace(context=row.context + shift), *rest)  # type: ignore[arg-type]

    patch.setattr(_AddingPlan, "_run_row", early)


def forget_the_open_window(patch: pytest.MonkeyPatch) -> None:
    """A step does not go on with the window that is open."""
    run = _AddingPlan._run_row

    def forgetful(plan: _AddingPlan, row: compressed_model._Row, *rest: Sequence[float]) -> None:
        run(plan, row._replace(read_slot=0), *rest)  # type: ignore[arg-type]

    patch.setattr(_AddingPlan, "_run_row", forgetful)


def copy_one_entry_fewer(patch: pytest.MonkeyPatch) -> None:
    """Of a page that is copied, the last entry of several tokens is left out."""
    copy = Pool.copy_page

    def fewer(pool: Pool, source: int, target: int, num_tokens: int) -> None:
        copy(pool, source, target, num_tokens - (pool.tokens_per_entry if pool.tokens_per_entry > 1 else 0))

    patch.setattr(Pool, "copy_page", fewer)


def read_other_places(patch: pytest.MonkeyPatch) -> None:
    """The places of entries in a page are taken in another order by those who read than by those who write."""
    slots = Pool.entry_slots

    def turned(pool: Pool, rows: Tensor, entries: Tensor) -> Tensor:
        found = slots(pool, rows, entries)
        return found - found % pool.entries_per_page + (found + entries // 3) % pool.entries_per_page

    patch.setattr(Pool, "entry_slots", turned)


def give_entries_the_padding_page(patch: pytest.MonkeyPatch) -> None:
    """Rows read the entries of the padding page where their own should be."""
    patch.setattr(Pool, "entry_slots", lambda pool, rows, entries: entries * 0 + PADDING_SLOT)


BUGS: dict[Callable[[pytest.MonkeyPatch], None], bool] = {
    keep_entries_of_refused_guesses: True,
    see_an_entry_early: False,
    forget_the_open_window: False,
    copy_one_entry_fewer: False,
    read_other_places: False,
    give_entries_the_padding_page: False,
}
"""Each with whether it takes guesses to show."""


@pytest.mark.parametrize(("plant", "guesses"), BUGS.items(), ids=[plant.__name__ for plant in BUGS])
def test_a_planted_bug_of_entries_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], guesses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = (play(draw_scenario(seed, STEPS, guesses=guesses, states=True)) for seed in range(MOST_SEEDS))
    assert next((violation for violation in found if violation is not None), None) is not None, plant.__doc__
