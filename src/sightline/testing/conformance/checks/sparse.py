"""Attention to chosen entries: the result is that over the entries which a query chose, and over no others.

The kit chooses itself, at random: what an indexer would choose is often what a fault reads too, such as the newest
entries. `choices` has the checks of indexers.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sightline.attention.kinds import Feature, SpecKind
from sightline.cache.layout import Layout
from sightline.core.batch import FULL
from sightline.testing.conformance.checks.features import BLIND, LSE, tree_rows
from sightline.testing.conformance.rig import Row, Unused
from sightline.testing.conformance.steps import Step
from sightline.testing.conformance.trial import Trial, check, needs_feature, ragged_rows

_LATENT = frozenset({SpecKind.LATENT})
_EXCUSED = needs_feature(Feature.SPARSE)
_TOP_KS = (4, 16, 1, 64)


@check("ragged lse transient tree-mask non-causal", kinds=_LATENT, excused=_EXCUSED)
def sparse(trial: Trial) -> None:
    """A query attends to the entries that it chose, whichever these are, and the LSE is over these.

    A step in which no row has more entries than may be chosen is dense.
    """
    page, needs = trial.page_size, LSE & trial.features
    kinds = [ragged_rows(page), [Row(40, 1), Row(70, 1), Row(3, 1)], [Row(0, 70)], [Row(90, 5)]]
    if Feature.NON_CAUSAL in trial.features:
        kinds.append([Row(20, 6, FULL), Row(0, 9, FULL), Row(30, 1)])
    if Feature.TREE_MASK in trial.features:
        kinds.append([*tree_rows(page), Row(0, 2, BLIND), Row(2, 2, BLIND)])
    for top_k in trial.some(_TOP_KS):
        spec = replace(trial.plain, top_k=top_k)
        # With fewer entries than may be chosen, as many, and more.
        around = [Row(max(top_k + delta - 1, 0), 1) for delta in (-2, -1, 0, 1, 2)]
        for rows in (*kinds, around, [around[1]], [around[2]], [around[3]]):
            trial.try_rows(rows, spec)
            trial.try_rows(rows, spec, needs=needs)
        trial.try_step(Step(trial.bench(spec), [Row(0, 70), Row(0, 2)], transient=True))
    # More than kernels take at once.
    trial.try_rows([Row(480, 1), Row(330, 2), Row(9, 1)], replace(trial.plain, top_k=300), needs=needs)


@check("sparse", "unused-slots", kinds=_LATENT, excused=_EXCUSED)
def unchosen_entries(trial: Trial) -> None:
    """An entry that no query chose is not read: NaN in it does not reach the output, not even with weight 0."""
    spec = replace(trial.plain, top_k=8)
    kinds = [[Row(60, 1), Row(40, 2), Row(3, 1)], [Row(50, 4)], [Row(0, 30), Row(20, 1)]]
    if Feature.TREE_MASK in trial.features:
        # The second query of a blind row sees nothing if the row has no context.
        kinds.append([Row(0, 2, BLIND), Row(30, 2), Row(20, 2, BLIND)])
    for layout in (Layout.IN_ORDER, Layout.SHUFFLED):
        setting = replace(trial.setting, unused=Unused.NAN, layout=layout)
        for rows in kinds:
            step = Step(trial.bench(spec, setting=setting), rows)
            clean = step.inputs, step.contexts
            _spoil_unchosen(step)
            answer = trial.run(step, LSE & trial.features)
            step.inputs, step.contexts = clean
            trial.agree(step, answer, "NaN in entries that were not chosen")


def _spoil_unchosen(step: Step) -> None:
    """Replaces all entries that no query chose by NaN, those of new tokens too."""
    start, contexts = 0, []
    step.change_inputs(torch.clone)
    for row, context in zip(step.rows, step.contexts, strict=True):
        unchosen = torch.ones(row.seq_len, dtype=torch.bool)
        chosen = step.inputs.chosen[start : start + row.query_len]
        unchosen[chosen[chosen >= 0].long()] = False
        contexts.append(tuple(plane.clone() for plane in context))
        contexts[-1][0][unchosen[: row.context_len]] = torch.nan
        for new in step.problem.of_new_entries(step.inputs):
            new[start : start + row.query_len][unchosen[row.context_len :]] = torch.nan
        start += row.query_len
    step.contexts = contexts
    step.write_contexts()


@check("sparse", "page-sizes", "page-sharing", kinds=_LATENT, excused=_EXCUSED)
def chosen_pages(trial: Trial) -> None:
    """Chosen entries are found in pages of any size and order."""
    sizes = trial.samples.of_page_sizes(trial.row)
    for page_size in trial.some([*sizes[1:], *sizes[:1]], 3):
        for layout in (Layout.SHUFFLED, Layout.DESCENDING):
            setting = replace(trial.setting, page_size=page_size, layout=layout, max_seq_len=max(512, 8 * page_size))
            trial.try_rows([*ragged_rows(page_size), Row(90, 2)], replace(trial.plain, top_k=12), setting)


@check("sparse", "next-batch", "padding", "layers", "run-again", kinds=_LATENT, excused=_EXCUSED)
def choices_in_turn(trial: Trial) -> None:
    """Each layer and step takes its own choice, sparse or not; what padding tokens chose is not read."""
    spec = replace(trial.plain, top_k=24)
    bench = trial.bench(spec, spec, trial.plain)
    for seed, rows in enumerate(
        ([Row(60, 2), Row(0, 4)], [Row(9, 3), Row(2, 1)], [Row(50, 2), Row(40, 4)], [Row(0, 3)])
    ):
        steps = [Step(bench, rows, seed=seed)]
        steps += [Step(bench, rows, seed=9 + layer, layer=layer, table_rows=steps[0].table_rows) for layer in (1, 2)]
        for step in steps:
            step.pad(1, 3, torch.nan)
        planned = bench.planner.ensure(steps[0].plan())
        planned.prepare()
        for step in steps:
            answer = step.attend(planned)
            trial.hold(step, answer, f"layer {step.layer}")
            trial.require(
                bool(answer.out[-3:].isnan().all()),
                "expected the output of padding tokens to be unchanged, got numbers",
            )
        for table_row in steps[0].table_rows:
            bench.store.close_row(table_row)
