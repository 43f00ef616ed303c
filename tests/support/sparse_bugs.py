"""Bugs to plant in sparse attention, each of which gives an error or a wrong answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sightline.attention.backends.torch import index_backend
from sightline.attention.backends.torch.index_backend import KeyPlane, TorchIndexBackend
from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import IndexInputs, StepView
from sightline.attention.groups import LayerGroup
from sightline.attention.planner import PlannedBatch, Planner
from sightline.attention.sparse import coordinator
from sightline.attention.sparse.chosen import ChosenSlots, plan_slots
from sightline.cache.pools import Pool
from sightline.core.batch import Batch
from sightline.kernels.choice import choose_highest
from sightline.kernels.chosen_slots import FindSlots
from sightline.layers.norm import LayerNorm
from sightline.models import deepseek, glm
from sightline.models.indexer import IndexerDefinition
from sightline.models.weights import WeightReader

Plant = Callable[[pytest.MonkeyPatch], None]


def _choose_by(patch: pytest.MonkeyPatch, choose: Callable[[Tensor, Tensor], None]) -> None:
    patch.setattr(index_backend, "choose_highest", choose)


def _change_rows(patch: pytest.MonkeyPatch, change: Callable[[Any, StepView, int], Any]) -> None:
    """Changes what the indexer plans for each row."""
    plan = TorchIndexBackend.plan

    def changed(self: TorchIndexBackend, step: StepView, buffers: PlanBuffers) -> Any:
        made = plan(self, step, buffers)
        return replace(made, rows=tuple(change(row, step, number) for number, row in enumerate(made.rows)))

    patch.setattr(TorchIndexBackend, "plan", changed)


def read_index_keys_of_a_stale_page(patch: pytest.MonkeyPatch) -> None:
    """The slots of a page-table row's keys are those that its first owner had."""
    known: dict[int, Tensor] = {}

    def stale(row: Any, step: StepView, number: int) -> Any:
        old = known.setdefault(step.batch.rows[number], row.slots.clone())
        count = min(len(old), len(row.slots))
        return replace(row, slots=torch.cat([old[:count], row.slots[count:]]))

    _change_rows(patch, stale)


def reverse_the_order_of_ties(patch: pytest.MonkeyPatch) -> None:
    """Of equal scores the highest places win."""

    def reversed_ties(scores: Tensor, out: Tensor) -> None:
        flipped = torch.empty_like(out)
        choose_highest(scores.flip(1), flipped)
        found = torch.where(flipped < 0, torch.iinfo(torch.int32).max, scores.shape[1] - 1 - flipped)
        out.copy_(torch.where(found.sort(1).values == torch.iinfo(torch.int32).max, -1, found.sort(1).values))

    _choose_by(patch, reversed_ties)


def choose_one_token_fewer(patch: pytest.MonkeyPatch) -> None:
    """The last of the chosen tokens is left out."""

    def fewer(scores: Tensor, out: Tensor) -> None:
        choose_highest(scores, out[:, :-1])
        out[:, -1] = -1

    _choose_by(patch, fewer)


def choose_one_token_more(patch: pytest.MonkeyPatch) -> None:
    """One token more is ranked than there is room for, and the last place is dropped."""

    def more(scores: Tensor, out: Tensor) -> None:
        wide = out.new_empty(out.shape[0], out.shape[1] + 1)
        choose_highest(scores, wide)
        out.copy_(wide[:, :-1])

    _choose_by(patch, more)


def choose_the_token_behind(patch: pytest.MonkeyPatch) -> None:
    """A new token may choose the one behind it."""

    def further(row: Any, step: StepView, number: int) -> Any:
        del step, number
        return replace(row, visible=(row.visible + 1).clamp(max=int(row.visible.max())))

    _change_rows(patch, further)


def turn_index_keys_in_the_other_order(patch: pytest.MonkeyPatch) -> None:
    """The indexer's rotation pairs halves where a family pairs neighbours, and the reverse."""
    for family in (deepseek, glm):
        patch.setattr(
            family, "_SPARSE", family._SPARSE._replace(paired_neighbours=not family._SPARSE.paired_neighbours)
        )


def use_the_indexer_of_the_first_layer(patch: pytest.MonkeyPatch) -> None:
    """Every indexer keeps and reads its keys where the first one does."""
    run = PlannedBatch.choose

    def of_the_first(self: PlannedBatch, layer: int, inputs: IndexInputs) -> Tensor | None:
        del layer
        return run(self, min(self.plan.indexers), inputs)

    patch.setattr(PlannedBatch, "choose", of_the_first)


def keep_the_choice_of_the_first_layer(patch: pytest.MonkeyPatch) -> None:
    """Layers behind the first indexer take its choice, whatever their own ones choose."""
    run, first = PlannedBatch.choose, dict[int, Tensor | None]()

    def kept(self: PlannedBatch, layer: int, inputs: IndexInputs) -> Tensor | None:
        found = run(self, layer, inputs)
        if layer == min(self.plan.indexers):
            first[0] = None if found is None else found.clone()
        return first[0]

    patch.setattr(PlannedBatch, "choose", kept)


def give_shared_layers_the_newest(patch: pytest.MonkeyPatch) -> None:
    """Layers without an indexer of their own attend to the newest tokens."""

    def newest(self: PlannedBatch, layer: int) -> Tensor | None:
        place = self.plan.indexers[layer]
        if not self.plan.groups[place.group].is_sparse:
            return None
        choice = self._choice(place)
        counts = (self.batch.positions + 1).clamp(max=choice.shape[1]).unsqueeze(1)
        places = torch.arange(choice.shape[1], device=choice.device)
        found = self.batch.positions.unsqueeze(1) + 1 - counts + places
        return torch.where(places < counts, found, -1).to(torch.int32)

    def choose(self: PlannedBatch, layer: int, inputs: IndexInputs) -> Tensor | None:
        place = self.plan.indexers[layer]
        self._run(place, inputs, self._choice(place))
        return self._choice(place) if self.plan.groups[place.group].is_sparse else None

    patch.setattr(PlannedBatch, "choose", choose)
    patch.setattr(PlannedBatch, "chosen", newest)


def find_slots_with_another_page_size(patch: pytest.MonkeyPatch) -> None:
    """Chosen places are looked up as if pages were twice as large."""

    def found(step: StepView, pool: Pool, buffers: PlanBuffers, find: FindSlots) -> ChosenSlots:
        slots = plan_slots(step, pool, buffers, find)
        return replace(slots, page_size=2 * slots.page_size)

    patch.setattr(coordinator, "plan_slots", found)


def find_slots_of_another_row(patch: pytest.MonkeyPatch) -> None:
    """The places that a token chose are looked up in the row of the first token."""

    def found(step: StepView, pool: Pool, buffers: PlanBuffers, find: FindSlots) -> ChosenSlots:
        slots = plan_slots(step, pool, buffers, find)
        slots.rows.copy_(slots.rows[:1].expand_as(slots.rows).clone())
        return slots

    patch.setattr(coordinator, "plan_slots", found)


def stay_dense_one_token_too_long(patch: pytest.MonkeyPatch) -> None:
    """A step is taken as dense although its longest row has one token more than are chosen."""
    decide = Planner._sparsity

    def late(self: Planner, group: LayerGroup, batch: Batch) -> Any:
        bounds = zip(batch.context_lens.bound, batch.query_lens.bound, strict=True)
        longest = max((context + new for context, new in bounds), default=0)
        return frozenset() if longest == (group.spec.top_k or 0) + 1 else decide(self, group, batch)

    patch.setattr(Planner, "_sparsity", late)


def keep_no_keys_of_dense_steps(patch: pytest.MonkeyPatch) -> None:
    """A step that is not sparse leaves its index keys unwritten."""
    plan = TorchIndexBackend.plan

    def without_keys(self: TorchIndexBackend, step: StepView, buffers: PlanBuffers) -> Any:
        made = plan(self, step, buffers)
        return made if step.is_sparse else replace(made, write_slots=None)

    patch.setattr(TorchIndexBackend, "plan", without_keys)


def write_keys_one_slot_late(patch: pytest.MonkeyPatch) -> None:
    """The keys of a step of several tokens are written in the slots of their neighbours."""
    write = KeyPlane.write

    def late(self: KeyPlane, slots: Tensor, keys: Tensor) -> None:
        write(self, slots, keys.roll(1, 0))

    patch.setattr(KeyPlane, "write", late)


def weigh_all_heads_alike(patch: pytest.MonkeyPatch) -> None:
    """The weights of the indexer's heads are left out."""
    run = PlannedBatch.choose

    def alike(self: PlannedBatch, layer: int, inputs: IndexInputs) -> Tensor | None:
        return run(self, layer, replace(inputs, weights=torch.ones_like(inputs.weights)))

    patch.setattr(PlannedBatch, "choose", alike)


def leave_out_the_bias_of_the_key_norm(patch: pytest.MonkeyPatch) -> None:
    """Index keys are normalised without the bias."""
    load = IndexerDefinition.load

    def without(self: IndexerDefinition, weights: WeightReader, prefix: str) -> Any:
        indexer = load(self, weights, prefix)
        norm: LayerNorm = indexer.key_norm
        assert norm.bias is not None
        norm.bias.zero_()
        return indexer

    patch.setattr(IndexerDefinition, "load", without)


SPARSE_BUGS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        read_index_keys_of_a_stale_page,
        choose_one_token_fewer,
        choose_one_token_more,
        choose_the_token_behind,
        turn_index_keys_in_the_other_order,
        use_the_indexer_of_the_first_layer,
        keep_the_choice_of_the_first_layer,
        give_shared_layers_the_newest,
        find_slots_with_another_page_size,
        find_slots_of_another_row,
        stay_dense_one_token_too_long,
        keep_no_keys_of_dense_steps,
        write_keys_one_slot_late,
        weigh_all_heads_alike,
        leave_out_the_bias_of_the_key_norm,
    )
}
