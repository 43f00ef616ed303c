"""Plans: one per batch for all layers and groups, and none that runs after its batch or pages have changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sightline.attention.kinds import PAGED_KINDS, Feature
from sightline.attention.oracle.dtypes import compute_dtypes
from sightline.attention.planner import PlannedBatch
from sightline.attention.rollout import following_steps
from sightline.attention.spec import AttentionSpec
from sightline.attention.workspace import MAIN_LANE, Lane
from sightline.cache.layout import Layout
from sightline.core.errors import StalePlanError
from sightline.testing.conformance.given_inputs import tensors_of, to_device
from sightline.testing.conformance.layer_step import LayerStep, bits
from sightline.testing.conformance.rig import AttentionRig, Row
from sightline.testing.conformance.trial import Trial, check, fail, needs_feature, ragged_rows

_ROWS = (Row(17, 1), Row(3, 4))
_OTHERS = (Row(30, 1), Row(31, 2), Row(0, 5))
_DRAFTED = 3
"""Steps of a draft."""


@check("ragged")
def layers(trial: Trial) -> None:
    """Each layer of a group has its own cache."""
    _try_layers(trial, trial.bench(trial.plain, trial.plain, trial.plain), _ROWS)


@check("layers", "window", "scale", "page-order", "head-dims", "grouped-heads", "heads")
def groups(trial: Trial) -> None:
    """In a hybrid model, every group of layers is planned with its own spec."""
    # Each group has its own pages. If they are shuffled, no two page tables are the same.
    setting = replace(trial.setting, layout=Layout.SHUFFLED)
    has_window = Feature.WINDOW in trial.features
    another = replace(trial.plain, window=6) if has_window else trial.problem.another(trial.plain)
    head_dim, size = trial.samples.of_head_dims(trial.row)[-1], trial.samples.of_group_sizes(trial.row)[-1]
    for other in (another, trial.spec(head_dim, size, 1)):
        bench = trial.bench(trial.plain, other, trial.plain, other, setting=setting)
        for rows in (_ROWS, _OTHERS):
            _try_layers(trial, bench, rows)


def _try_layers(trial: Trial, bench: AttentionRig, rows: Sequence[Row]) -> None:
    """Runs every layer of the rig on one plan."""
    steps = [trial.step(bench, rows, seed=0, layer=0)]
    for layer in range(1, len(bench.specs)):
        steps.append(trial.step(bench, rows, seed=layer, layer=layer, table_rows=steps[0].table_rows))
    planned = steps[0].plan()
    planned.prepare()
    for step in steps:
        trial.hold(step, step.attend(planned), f"layer {step.layer}")


@check("ragged")
def inputs_kept(trial: Trial) -> None:
    """`run` leaves its inputs unchanged."""
    spec = replace(trial.plain, sinks=True) if Feature.SINKS in trial.features else trial.plain
    for dtype in compute_dtypes(trial.row):
        _inputs_kept(trial.in_dtype(dtype), spec)


def _inputs_kept(trial: Trial, spec: AttentionSpec) -> None:
    step = trial.step(trial.bench(spec), ragged_rows(trial.page_size))
    batch = {name: tensor.cpu().clone() for name, tensor in _batch_tensors(step).items()}
    planned = step.plan()
    planned.prepare()
    given = to_device(step.inputs, trial.subject.device.torch_device)
    step.launch(planned, given, step.room(planned))
    after = {**tensors_of(given), **_batch_tensors(step)}
    for name, before in {**tensors_of(step.inputs), **batch}.items():
        trial.require(
            torch.equal(after[name].cpu(), before),
            f"expected a step to leave its inputs unchanged, got a changed {name}",
        )


def _batch_tensors(step: LayerStep) -> dict[str, Tensor]:
    batch, store = step.batch, step.bench.store
    pools = {f"write slots of {key}": rows.write_slots for key, rows in batch.pools.items()}
    pools |= {
        f"read slots of {key}": rows.read_slots for key, rows in batch.pools.items() if rows.read_slots is not None
    }
    return {
        "tokens": batch.tokens,
        "positions": batch.positions,
        "query_lens": batch.query_lens.device,
        "context_lens": batch.context_lens.device,
        **pools,
        **{f"page table of {pool.key}": pool.table.pages for pool in store.pools},
    }


@check("ragged", "run-again")
def strided_inputs(trial: Trial) -> None:
    """Queries, keys and values may be slices of one tensor."""
    for rows in (ragged_rows(trial.page_size), [Row(0, 6)], [Row(9, 1)]):
        step = trial.step(trial.bench(), rows)
        planned = step.plan()
        planned.prepare()
        for what, inputs in trial.problem.strided(step.inputs, step.bench.device):
            out = step.room(planned)
            trial.agree(step, step.answer_in(planned, out, step.launch(planned, inputs, out)), what)
        trial.progress.num_steps += 1


@check("next-batch", "run-again")
def lanes(trial: Trial) -> None:
    """Plans in two lanes may be used in turn."""
    bench = trial.bench(setting=replace(trial.setting, lanes=(MAIN_LANE, Lane(1))))
    first, second = trial.step(bench, _ROWS), trial.step(bench, _OTHERS, seed=1)
    plans = [bench.planner.plan(first.batch), bench.planner.plan(second.batch, lane=Lane(1))]
    for planned in plans:
        planned.prepare()
    for _ in range(2):
        for step, planned in zip((first, second), plans, strict=True):
            trial.require(
                bench.planner.ensure(planned) is planned,
                "expected the plans of two lanes to stay valid, got one planned again",
            )
            others = bench.workspace.of_other_lanes(planned.plan.certificate.lane)
            before = {name: bits(tensor).clone() for name, tensor in others.items()}
            trial.hold(step, step.attend(planned), "two plans in two lanes")
            changed = [name for name, tensor in others.items() if not torch.equal(bits(tensor), before[name])]
            trial.require(
                not changed, f"expected a step to leave another lane's leases unchanged, got a change of {changed}"
            )


_KINDS: tuple[Sequence[Row], ...] = (
    [Row(30, 2), Row(31, 3)],
    [Row(0, 12), Row(0, 5)],
    [Row(9, 1), Row(40, 1)],
)
"""Chunks, prompts and decode rows: a backend may keep separate plan memory for each."""


@check("next-batch", "run-again")
def plan_buffers(trial: Trial) -> None:
    """The older of two plans in one lane is found stale, because all that a plan derives is in plan buffers."""
    pairs = [(_ROWS, _KINDS[0]), *itertools.permutations(_KINDS, 2)]
    for older, newer in trial.some(pairs):
        bench = trial.bench()
        first, second = trial.step(bench, older), trial.step(bench, newer, seed=1)
        early, late = first.plan(), second.plan()
        for _ in range(2):
            for step, planned in ((second, late), (first, early)):
                current = bench.planner.ensure(planned)
                current.prepare()
                trial.hold(step, step.attend(current), "two plans in one lane, the older planned again")


@check("plan-buffers", excused=needs_feature(Feature.SEVERAL_PLANS), kinds=PAGED_KINDS)
def several_plans(trial: Trial) -> None:
    """Steps of a draft that were all planned before the first of them ran are right."""
    page = trial.page_size
    for rows in trial.some((_ROWS, (Row(page - 1, 1), Row(3, 1), Row(2 * page, 1)))):
        bench = trial.bench(setting=replace(trial.setting, max_rollout=_DRAFTED))
        step: LayerStep = trial.step(bench, rows)
        for row, table_row in zip(rows, step.table_rows, strict=True):
            bench.store.grow_row(table_row, row.seq_len + _DRAFTED)
        for number, planned in enumerate(bench.planner.rollout(following_steps(step.batch, _DRAFTED))):
            step = step.next_step(1, seed=number) if number else step
            current = bench.planner.ensure(planned)
            current.prepare()
            trial.hold(step, step.attend(current), f"step {number} of {_DRAFTED} planned at once")


@check("next-batch", "long-beside-short")
def filled_buffers(trial: Trial) -> None:
    """A plan fills every buffer that it takes, and does not use the old contents."""
    bench = trial.bench(setting=replace(trial.setting, paranoid=True))
    for seed, rows in enumerate((_OTHERS, _ROWS, ragged_rows(trial.page_size))):
        trial.try_step(trial.step(bench, rows, seed=seed))
    trial.try_step(trial.step(trial.bench(setting=replace(bench.setting, max_seq_len=2560)), [Row(2000, 1), Row(3, 1)]))


def _foreign(step: LayerStep, other: LayerStep) -> PlannedBatch:
    return replace(other.plan(), batch=step.batch)


def _padded(step: LayerStep, other: LayerStep) -> PlannedBatch:
    del other
    return replace(step.plan(), batch=step.batch.pad(len(step.rows) + 1, step.batch.num_tokens))


def _reordered(step: LayerStep, other: LayerStep) -> PlannedBatch:
    del other
    return replace(step.bench.planner.plan(step.batch.take([1, 0])), batch=step.batch)


def _forged(step: LayerStep, other: LayerStep) -> PlannedBatch:
    mine = step.plan()
    return replace(mine, plan=replace(other.plan(lane=Lane(1)).plan, certificate=mine.plan.certificate))


def _of_another_planner(step: LayerStep, other: LayerStep) -> PlannedBatch:
    del other
    return step.bench.another_planner().plan(step.batch)


_REBUILT: dict[str, Callable[[LayerStep, LayerStep], PlannedBatch]] = {
    "another batch's plan": _foreign,
    "a plan kept while its batch was padded": _padded,
    "a plan of the same rows in another order": _reordered,
    "another batch's plan under this batch's certificate": _forged,
    "another planner's plan": _of_another_planner,
}
"""Stale plans that `ensure` must replace by a new plan."""


@check("plan-buffers", "idle")
def stale_plans(trial: Trial) -> None:
    """A plan of another batch, or one whose batch or pages have changed, is planned again or refused."""
    setting = replace(trial.setting, lanes=(MAIN_LANE, Lane(1)))
    for way, make in _REBUILT.items():
        bench = trial.bench(setting=setting)
        step, other = trial.step(bench, _ROWS), trial.step(bench, _OTHERS, seed=1)
        planned = make(step, other)
        current = bench.planner.ensure(planned)
        current.prepare()
        trial.require(current.plan is not planned.plan, f"expected {way} to be planned again, got it back unchanged")
        trial.hold(step, step.attend(current), way)
    bench = trial.bench(setting=setting)
    step = trial.step(bench, _ROWS)
    idle = bench.planner.ensure(replace(step.plan(), batch=step.batch.idle()))
    trial.require(
        idle.plan.certificate.num_rows == 0, "expected a batch turned idle to be planned again, got its old plan"
    )
    _must_raise(bench, step, "pages that went back", lambda: bench.store.close_row(step.table_rows[1]))
    bench = trial.bench(setting=setting)
    step = trial.step(bench, _ROWS)
    _must_raise(bench, step, "pages that changed owner", lambda: _reopen(bench, step))
    elsewhere = trial.step(trial.bench(setting=setting), _ROWS)
    _must_raise(bench, elsewhere, "pages of other pools", lambda: None)


def _reopen(bench: AttentionRig, step: LayerStep) -> None:
    """Closes a row and opens it for another owner, with pages for as many tokens."""
    bench.store.close_row(step.table_rows[0])
    row = bench.store.open_row()
    bench.store.grow_row(row, step.rows[0].seq_len)


def _must_raise(bench: AttentionRig, step: LayerStep, way: str, change: Callable[[], None]) -> None:
    planned = step.plan()
    change()
    try:
        bench.planner.ensure(planned)
    except StalePlanError:
        return
    fail(f"expected a StalePlanError for a plan over {way}, got a plan to run")
