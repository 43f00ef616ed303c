"""Runs a case: builds its rig, runs the steps before and beside its own, and compares its layers with the oracle.

The oracle is asked about some queries of long rows and about some of many rows, those at borders first; all other
outputs must be finite. A single key among thousands has next to no weight. To notice a missing one, queries of long
rows look for keys at borders: the first, the last, their own, and both sides of a window's edge.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from sightline.attention.dimensions import Dimension, LaneUse, Reuse, Span
from sightline.attention.kinds import COMPRESSED_KINDS, ENTRY_KINDS, PAGED_KINDS, STATE_KINDS, Feature, SpecKind
from sightline.attention.oracle.dtypes import dtype_named
from sightline.attention.planner import PlannedBatch
from sightline.attention.workspace import MAIN_LANE, Lane
from sightline.cache.layout import Layout
from sightline.testing.conformance.cases import GOES_ON_BY, OTHERS, Case
from sightline.testing.conformance.domains import borders
from sightline.testing.conformance.layer_step import Asked, LayerStep
from sightline.testing.conformance.rig import SCALES, Memory, RigSetting, Row, Unused
from sightline.testing.conformance.state_steps import StateStep
from sightline.testing.conformance.steps import Step
from sightline.testing.conformance.trial import Trial

StepT = TypeVar("StepT", bound=LayerStep)
_SECOND_LANE = Lane(1)
_ALL_QUERIES = 16
"""The oracle is asked about all new tokens of a row that has at most this many."""
_SOME_QUERIES = 8
_ALL_ROWS = 24
_LONG = 48
"""The number of keys above which a single one may go unnoticed."""


def try_case(trial: Trial, case: Case) -> None:
    """Runs a case. Raises `CheckFailed`, or whatever the backend raises."""
    _RUNS[trial.subject.kind](trial, case).run()


class _Run(ABC, Generic[StepT]):
    """One case on its own rig."""

    def __init__(self, trial: Trial, case: Case) -> None:
        dtypes = [
            dtype_named(case.name(each)) for each in (Dimension.DTYPE, Dimension.CACHE_DTYPE) if each in case.values
        ]
        self._trial = trial.in_dtype(*dtypes)
        self._case = case
        self._draw = random.Random(f"run {case.seed}")
        self._lane = _SECOND_LANE if case.name(Dimension.LANE) == LaneUse.SECOND.value else MAIN_LANE
        self._needs = frozenset({Feature.LSE}) if Feature.LSE.value in case.features else frozenset()
        self._bench = self._trial.bench(*[self._spec()] * case.number(Dimension.LAYERS), setting=self._setting())

    def run(self) -> None:
        reuse = self._case.name(Dimension.REUSE)
        if reuse == Reuse.AFTER_OTHERS.value:
            for seed, rows in enumerate((OTHERS, OTHERS[::-1])):
                other = self._other(rows, seed)
                self._attend_other(other, other.plan(self._needs, self._lane))
                for table_row in other.table_rows:
                    self._bench.store.close_row(table_row)
        steps = self._steps()
        planned = steps[0].plan(self._needs, self._lane)
        beside = self._other(OTHERS, 2) if self._lane != MAIN_LANE else None
        planned_beside = beside.plan() if beside is not None else None
        if planned_beside is not None:
            planned_beside.prepare()
        if reuse == Reuse.AGAIN.value:
            other = self._other(OTHERS[::-1], 3)
            self._attend_other(other, other.plan(self._needs, self._lane))
            planned = self._bench.planner.ensure(planned)
        self._attend(steps, planned)
        if beside is not None and planned_beside is not None:
            self._trial.hold(beside, beside.attend(planned_beside), "the plan in the other lane")

    @abstractmethod
    def _spec(self) -> Any:
        """Returns the spec of all layers."""

    @abstractmethod
    def _steps(self) -> list[StepT]:
        """Returns a step for each layer that is run: the same rows with other inputs and contexts.

        If the case goes on, an earlier step of the backend has written the ends of the contexts.
        """

    def _setting(self) -> RigSetting:
        case = self._case
        more_rows, more_tokens = case.padding
        longest = case.main_len
        tokens = case.num_tokens + more_tokens
        if case.has_others:
            longest = max(longest, *(row.seq_len for row in OTHERS))
            tokens = max(tokens, sum(row.query_len for row in OTHERS))
        if case.goes_on:
            tokens = max(tokens, sum(map(self._written_before, range(len(case.lengths)))))
        return replace(
            self._trial.setting,
            page_size=case.number(Dimension.PAGE_SIZE),
            layout=Layout(case.name(Dimension.PAGE_ORDER)),
            unused=Unused.NAN,
            memory=Memory.POISON,
            cache_scales=SCALES,
            paranoid=case.seed % 3 == 0 and case.seconds < 0.1,
            max_seq_len=longest,
            max_rows=len(case.lengths) + more_rows + (2 * len(OTHERS) if case.has_others else 0),
            max_step_tokens=tokens,
            num_pages=case.num_pages,
            pages_passed_over=case.num_pages - case.needed_pages,
            lanes=(MAIN_LANE,) if self._lane == MAIN_LANE else (MAIN_LANE, self._lane),
        )

    def _written_before(self, row: int) -> int:
        """Returns how many entries of a row's context the backend itself writes in an earlier step."""
        case = self._case
        shared = case.shared_pages * case.number(Dimension.PAGE_SIZE)
        return min(GOES_ON_BY, case.lengths[row][0] - shared) if case.goes_on else 0

    def _other(self, rows: Sequence[Row], seed: int) -> LayerStep:
        layer = self._case.number(Dimension.LAYERS) - 1
        return self._trial.step(self._bench, rows, seed=1000 + seed, layer=layer)

    def _attend_other(self, step: LayerStep, planned: PlannedBatch) -> None:
        planned.prepare()
        self._trial.hold(step, step.attend(planned), "a step before or beside it")

    def _asked(self, layer: int) -> Asked:
        """Returns the queries of each row that are compared with the oracle.

        If there are many rows, each layer but the last compares some of them.
        """
        case = self._case
        draw = random.Random(f"asked {case.seed} {layer}")
        rows = list(range(len(case.rows)))
        if len(rows) > _ALL_ROWS and layer != case.number(Dimension.LAYERS) - 1:
            rows = sorted({*rows[:4], *rows[-4:], case.main_row, *draw.sample(rows, _ALL_ROWS // 2)})
        return {row: self._queries(case.rows[row], draw) for row in rows}

    def _queries(self, row: Row, draw: random.Random) -> list[int]:
        if row.query_len <= _ALL_QUERIES:
            return list(range(row.query_len))
        last = row.query_len - 1
        near = borders(Span(0, last), self._case.number(Dimension.PAGE_SIZE))
        return sorted({0, last, *draw.sample(near, 3), *(draw.randint(1, last) for _ in range(3))})

    def _attend(self, steps: Sequence[LayerStep], planned: PlannedBatch) -> None:
        """Runs every layer in order, and compares some of them with the oracle."""
        planned.prepare()
        num_tokens, compared = self._case.num_tokens, self._case.compared_layers()
        answers = {step.layer: step.attend(planned) for step in steps}
        for step in steps:
            answer = answers[step.layer]
            if step.layer not in compared:
                self._trial.require(
                    bool(answer.out[:num_tokens].isfinite().all()),
                    f"expected a finite output from layer {step.layer}, got NaN or infinity in it",
                )
                continue
            self._trial.hold(step, answer, f"layer {step.layer}", self._asked(step.layer))
            self._trial.require_lse(step, answer, wanted=bool(self._needs))
            self._trial.require(
                bool(answer.out[num_tokens:].isnan().all()),
                "expected the output of padding tokens to be unchanged, got numbers",
            )


class _EntryRun(_Run[Step]):
    """One case of layers that keep entries."""

    def _spec(self) -> Any:
        case = self._case
        numbers = (case.number(each) for each in (Dimension.HEAD_DIM, Dimension.GROUP_SIZE, Dimension.KEY_HEADS))
        spec = self._trial.problem.spec(*numbers)
        changes: dict[str, object] = {}
        if self._trial.subject.kind in ENTRY_KINDS:
            changes["scale"] = spec.scale * self._draw.uniform(0.7, 1.3)
        if case.window is not None:
            changes["window"] = case.window
        if Feature.SOFTCAP.value in case.features:
            # Among many keys, a single one needs a higher score to be noticed.
            changes["softcap"] = 20.0 if case.main_len > _LONG else 1.5
        if Feature.SINKS.value in case.features:
            changes["sinks"] = True
        if case.top_k is not None:
            changes["top_k"] = case.top_k
        return replace(spec, **changes)

    def _steps(self) -> list[Step]:
        case, steps = self._case, list[Step]()
        for layer in case.run_layers():
            steps.append(self._step(layer, steps[0].table_rows if steps else None))
        for step in steps:
            step.pad(*case.padding, torch.nan)
        if case.goes_on:
            self._run_before(steps)
        return steps

    def _step(self, layer: int, table_rows: Sequence[int] | None) -> Step:
        case, seed = self._case, 100 * self._case.seed + layer
        if case.is_transient:
            step = self._trial.paged_step(self._bench, case.rows, seed=seed, layer=layer, transient=True)
            self._look_closely(step)
            return step
        if table_rows is None:
            table_rows = self._bench.open_rows(case.rows, case.shared_pages, case.main_row)
        where = {"layer": layer, "table_rows": table_rows, "writes": False}
        step = self._trial.paged_step(self._bench, case.rows, seed=seed, **where)
        self._look_closely(step)
        self._share(step)
        step.write_contexts([context - self._written_before(row) for row, (context, _) in enumerate(case.lengths)])
        return step

    def _share(self, step: Step) -> None:
        """Copies the main row's shared prefix into the contexts of all rows."""
        shared = self._case.shared_pages * self._case.number(Dimension.PAGE_SIZE)
        main = step.contexts[self._case.main_row]
        if shared:
            for context in step.contexts:
                for plane, first in zip(context, main, strict=True):
                    plane[:shared] = first[:shared]

    def _look_closely(self, step: Step) -> None:
        """Gives single keys of long rows, and sinks, enough weight to be noticed."""
        start, asked = 0, self._asked(step.layer)
        for number, row in enumerate(step.rows):
            tokens = slice(start, start + row.query_len)
            start = tokens.stop
            if row.seq_len > _LONG and number in asked:
                places = self._sought(row, asked[number])
                if step.inputs_choose:
                    places = self._sought_chosen(step.inputs.chosen[tokens], asked[number])
                step.problem.look_for(step.spec, step.inputs, tokens, step.contexts[number], places)
        longest = min(self._case.main_len, self._case.window or self._case.main_len)
        if Feature.SINKS.value in self._case.features and longest > _LONG:
            step.inputs.sinks.add_(torch.tensor(longest / _LONG).log().item())

    def _sought(self, row: Row, queries: Sequence[int]) -> list[int]:
        """Returns keys at borders: of the row, its context and a page, and of what the queries see."""
        page, window = self._case.number(Dimension.PAGE_SIZE), self._case.window
        places = {0, page, row.context_len - 1, row.context_len, row.seq_len - 1}
        positions = row.positions or range(row.context_len, row.seq_len)
        for query in queries[-_SOME_QUERIES:]:
            places.add(row.context_len + query)
            if window is not None:
                places |= {positions[query] - window, positions[query] - window + 1}
        return sorted(place for place in places if 0 <= place < row.seq_len)

    def _sought_chosen(self, chosen: Tensor, queries: Sequence[int]) -> list[int]:
        """Returns the first and the last entry that each of some queries chose, and one between them."""
        places = set[int]()
        for query in queries[-_SOME_QUERIES:]:
            taken = [place for place in chosen[query].tolist() if place >= 0]
            places |= {taken[0], taken[-1], self._draw.choice(taken)} if taken else set()
        return sorted(places)

    def _run_before(self, steps: Sequence[Step]) -> None:
        """Runs an earlier step of the same rows, in which the backend writes the ends of their contexts."""
        written = {row: count for row in range(len(self._case.rows)) if (count := self._written_before(row))}
        earlier = [step.step_before(written) for step in steps]
        planned = earlier[0].plan(self._needs, self._lane)
        self._bench.planner.launch(planned)
        planned.prepare()
        answers = [step.attend(planned) for step in earlier]
        compared = self._case.compared_layers()
        for step, answer in zip(earlier, answers, strict=True):
            if step.layer in compared:
                rows = self._asked(step.layer)
                asked = {place: range(written[row]) for place, row in enumerate(written) if row in rows}
                self._trial.hold(step, answer, f"layer {step.layer} of the step before", asked)


class _StateRun(_Run[StateStep]):
    """One case of layers that keep states."""

    def _spec(self) -> Any:
        case, problem = self._case, self._trial.problem
        dims = frozenset({(case.number(Dimension.HEAD_DIM), case.number(Dimension.VALUE_DIM))})
        numbers = (case.number(each) for each in (Dimension.HEAD_DIM, Dimension.GROUP_SIZE, Dimension.KEY_HEADS))
        unit_keys = case.number(Dimension.UNIT_KEYS) == 1
        width = case.number(Dimension.CONV_WIDTH)
        return problem.with_features(problem.spec(*numbers, dims), case.features, width, unit_keys=unit_keys)

    def _setting(self) -> RigSetting:
        case = self._case
        return replace(
            super()._setting(),
            layout=Layout(case.name(Dimension.SLOT_ORDER)),
            states_per_row=case.states_per_row,
            max_checkpoints=case.max_checkpoints,
        )

    def _steps(self) -> list[StateStep]:
        case = self._case
        earlier = self._earlier() if case.goes_on else []
        if earlier:
            steps = [step.continued(case.rows, seed=self._seed(step.layer)) for step in earlier]
        else:
            steps = [self._step(layer) for layer in case.run_layers()[:1]]
            steps += [self._step(layer, steps[0].table_rows) for layer in case.run_layers()[1:]]
        for step in steps:
            step.pad(*case.padding, torch.nan)
        return steps

    def _seed(self, layer: int) -> int:
        return 100 * self._case.seed + layer

    def _step(self, layer: int, table_rows: Sequence[int] | None = None) -> StateStep:
        case = self._case
        shared = {"transient": True} if case.is_transient else {"table_rows": table_rows}
        return StateStep(self._bench, case.rows, seed=self._seed(layer), layer=layer, **shared)

    def _step_before(self, rows: Sequence[Row], layer: int, table_rows: Sequence[int] | None) -> StateStep:
        return StateStep(self._bench, rows, seed=layer, layer=layer, table_rows=table_rows)

    def _earlier(self) -> list[StateStep]:
        """Runs a step in which the backend computes the states that the case's rows begin with."""
        case, steps = self._case, list[StateStep]()
        written = [self._written_before(row) for row in range(len(case.rows))]
        rows = [Row(row.context_len - count, count) for row, count in zip(case.rows, written, strict=True)]
        for layer in case.run_layers():
            table_rows = steps[0].table_rows if steps else None
            steps.append(self._step_before(rows, layer, table_rows))
        planned = steps[0].plan(self._needs, self._lane)
        planned.prepare()
        answers = [step.attend(planned) for step in steps]
        for step, answer in zip(steps, answers, strict=True):
            if step.layer in case.compared_layers():
                asked = {row: range(written[row]) for row in self._asked(step.layer)}
                self._trial.hold(step, answer, f"layer {step.layer} of the step before", asked)
        steps[0].commit(self._lane)
        return steps


class _CompressedRun(_StateRun):
    """One case of compressed attention, or of indexers over compressed keys."""

    def _spec(self) -> Any:
        case = self._case
        numbers = (case.number(each) for each in (Dimension.HEAD_DIM, Dimension.GROUP_SIZE, Dimension.KEY_HEADS))
        spec, ratio = self._trial.problem.spec(*numbers), case.number(Dimension.RATIO)
        compression = None
        if ratio:
            compression = replace(spec.compression, ratio=ratio, overlap=case.number(Dimension.OVERLAP) == 1)
        changes: dict[str, object] = {"compression": compression, "top_k": case.top_k}
        return replace(spec, **changes, **({} if case.window is None else {"window": case.window}))

    def _setting(self) -> RigSetting:
        return replace(super()._setting(), layout=Layout(self._case.name(Dimension.PAGE_ORDER)))

    def _step(self, layer: int, table_rows: Sequence[int] | None = None) -> StateStep:
        case = self._case
        if case.is_transient:
            return self._trial.state_step(self._bench, case.rows, seed=self._seed(layer), layer=layer, transient=True)
        return self._over(case.rows, layer, self._seed(layer), table_rows)

    def _over(self, rows: Sequence[Row], layer: int, seed: int, table_rows: Sequence[int] | None) -> StateStep:
        """A step of some of the case's tokens, over rows that have pages for all of them."""
        case = self._case
        if table_rows is None:
            # Without entries there are no pages to share.
            shared_pages = case.shared_pages if self._bench.store.pools else 0
            table_rows = self._bench.open_rows(case.rows, shared_pages, case.main_row)
        step = self._trial.state_step(self._bench, rows, seed=seed, layer=layer, table_rows=table_rows, writes=False)
        shared, main = case.shared_pages * case.number(Dimension.PAGE_SIZE), step.contexts[case.main_row]
        if shared:
            step.contexts = [
                tuple(torch.cat([first[:shared], own[shared:]]) for first, own in zip(main, context, strict=True))
                for context in step.contexts
            ]
        step.write_contexts()
        return step

    def _step_before(self, rows: Sequence[Row], layer: int, table_rows: Sequence[int] | None) -> StateStep:
        return self._over(rows, layer, layer, table_rows)


_RUNS: Mapping[SpecKind, type[_Run[Any]]] = {
    **dict.fromkeys(COMPRESSED_KINDS, _CompressedRun),
    **dict.fromkeys(PAGED_KINDS, _EntryRun),
    **dict.fromkeys(STATE_KINDS, _StateRun),
}
"""How the cases of each kind are run."""
