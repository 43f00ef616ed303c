"""Borrowed caches: a plan reads what another layer wrote, in that layer's slots, and writes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sightline.attention.kinds import ENTRY_KINDS, Feature
from sightline.cache.layout import Layout
from sightline.core.batch import CONTEXT
from sightline.testing.conformance.checks.cache import snapshot
from sightline.testing.conformance.rig import AttentionRig, Row, Unused
from sightline.testing.conformance.steps import Step, bits
from sightline.testing.conformance.trial import Trial, check, needs_feature, ragged_rows

_LENDERS = {3: 1, 4: 2, 5: 0}
"""Layers 3 and 4 have one spec and read the second and the third layer; layer 5 has another spec."""


def _bench(trial: Trial, unused: Unused) -> AttentionRig:
    """Three layers with entries of their own, and three that borrow them, in another order."""
    plain: Any = trial.plain
    other = replace(plain, scale=1.5 * plain.scale)
    if Feature.WINDOW in trial.features:
        other = replace(other, window=trial.page_size + 1)
    setting = replace(trial.setting, layout=Layout.SHUFFLED, unused=unused)
    return trial.bench(*[plain] * 5, other, setting=setting, lenders=_LENDERS)


def _try_reading(trial: Trial, step: Step) -> None:
    """Runs a step of a layer that borrows, and compares it with the oracle; no bit of any pool may change."""
    before = snapshot(step.bench)
    trial.try_step(step, frozenset({Feature.LSE}) & trial.features)
    for name, after in snapshot(step.bench).items():
        trial.require(
            bool((bits(after) == bits(before[name])).all()),
            f"expected a BORROWED plan to write nothing, got a change of {name}",
        )


@check("page-order", "padding", name="shared-cache", excused=needs_feature(Feature.SHARED_CACHE), kinds=ENTRY_KINDS)
def borrowed(trial: Trial) -> None:
    """A BORROWED plan reads the entries of its lender, context and new ones, and writes nothing."""
    rows = ragged_rows(trial.page_size)
    for unused in Unused:
        for layer in _LENDERS:
            # With several new tokens in some row, and with one in each.
            for chosen in (rows, [row for row in rows if row.query_len == 1]):
                step = Step(_bench(trial, unused), chosen, layer=layer)
                step.pad(1, 3, float("nan"))
                _try_reading(trial, step)


@check("shared-cache", excused=needs_feature(Feature.SHARED_CACHE), kinds=ENTRY_KINDS)
def lent_in_the_step(trial: Trial) -> None:
    """A BORROWED plan sees what its lender writes earlier in the same step."""
    for rows in (ragged_rows(trial.page_size), [Row(trial.page_size, 1), Row(0, 1), Row(3, 1)]):
        for layer, lender in _LENDERS.items():
            bench = _bench(trial, Unused.NAN)
            writing = Step(bench, rows, layer=lender)
            reading = Step(bench, rows, seed=1, layer=layer, table_rows=writing.table_rows, contexts=writing.contexts)
            entries = trial.problem.entries(writing.inputs)
            trial.problem.put_entries(reading.spec, reading.inputs, entries)
            planned = bench.planner.ensure(writing.plan())
            planned.prepare()
            trial.hold(writing, writing.attend(planned), "the lender")
            trial.hold(reading, reading.attend(planned), "the layer that borrows")


@check("shared-cache", excused=needs_feature(Feature.SHARED_CACHE), kinds=ENTRY_KINDS)
def context_alone(trial: Trial) -> None:
    """Tokens under a CONTEXT mask see the context and have no entries: no page behind the context is needed."""
    page = trial.page_size
    contexts = [0, 1, page - 1, page, page + 1, 3 * page + 2]
    alone = [Row(context, 1, CONTEXT) for context in contexts]
    several = [Row(page + 1, 3, CONTEXT), Row(0, 2, CONTEXT), Row(2, page + 3, CONTEXT)]
    beside = [Row(page + 3, 1), Row(0, 4), *alone, Row(2, 3), *several]
    for layer in _LENDERS:
        for rows in (alone, several, beside):
            _try_reading(trial, Step(_bench(trial, Unused.NAN), rows, layer=layer))
