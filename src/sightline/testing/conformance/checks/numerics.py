"""Numerics: every dtype, sums over many keys, scores far from 0, and equal bits if they are declared."""

from __future__ import annotations

from dataclasses import replace

import torch

from sightline.attention.kinds import ENTRY_KINDS, PAGED_KINDS, Feature
from sightline.attention.oracle.dtypes import cache_dtypes, compute_dtypes
from sightline.testing.conformance.layer_step import HostOutput
from sightline.testing.conformance.rig import RigSetting, Row
from sightline.testing.conformance.steps import Step
from sightline.testing.conformance.trial import Trial, check, needs_feature, ragged_rows


@check("ragged")
def dtypes(trial: Trial) -> None:
    """Every declared dtype works."""
    for dtype in compute_dtypes(trial.row)[1:]:
        other = trial.in_dtype(dtype)
        other.try_rows(ragged_rows(trial.page_size))


@check("dtypes", name="cache-dtypes", kinds=PAGED_KINDS)
def cache_dtype_pairs(trial: Trial) -> None:
    """Every declared pair of compute and cache dtype works."""
    for cache_dtype in cache_dtypes(trial.row):
        for dtype in compute_dtypes(trial.row):
            other = trial.in_dtype(dtype, cache_dtype)
            other.try_rows(ragged_rows(trial.page_size))


def _long(trial: Trial, longest: int) -> RigSetting:
    return replace(trial.setting, max_seq_len=longest + 64, max_rows=2)


@check("ragged", kinds=ENTRY_KINDS)
def split_merge(trial: Trial) -> None:
    """Rows of hundreds and thousands of keys are right, even if their parts have very different weights."""
    lengths = [border + delta for border in (256, 512, 1024, 2048) for delta in (-1, 0, 1)]
    for length in trial.some([1025, 300, *lengths]):
        for slope in (6.0, -6.0):
            step = Step(trial.bench(setting=_long(trial, length)), [Row(length - 1, 1)])
            # Scores that climb or fall along the row, so that the parts' maxima and weights differ.
            ramp = torch.linspace(0.0, slope, length - 1)
            step.contexts[0] = trial.problem.climbing(step.spec, step.inputs, step.contexts[0], ramp)
            step.write_contexts()
            trial.try_step(step)


@check("each-key-once", kinds=ENTRY_KINDS)
def accumulation(trial: Trial) -> None:
    """Sums over thousands of keys do not lose small terms."""
    length = 4096
    for dtype in compute_dtypes(trial.row):
        low = trial.in_dtype(dtype)
        for centre, spread in ((1.0, 0.1), (1.3, 0.0)):
            step = Step(low.bench(setting=_long(low, length)), [Row(length - 1, 1)])
            # All keys weigh the same and the values are alike: a sum that loses small terms loses most of it.
            step.weigh_alike()
            values = low.problem.values(step.spec, step.contexts[0])
            values.copy_(centre + spread * values.float())
            low.problem.new_values(step.inputs).fill_(centre)
            step.write_contexts()
            low.try_step(step)


@check("features-together", "dtypes", kinds=ENTRY_KINDS)
def large_scores(trial: Trial) -> None:
    """Scores of hundreds do not overflow."""
    declared = trial.features
    specs = [trial.plain]
    specs += [replace(trial.plain, sinks=True)] if Feature.SINKS in declared else []
    specs += [replace(trial.plain, softcap=2.0)] if Feature.SOFTCAP in declared else []
    for dtype in compute_dtypes(trial.row):
        other = trial.in_dtype(dtype)
        for spec in specs:
            for factor in trial.some((30.0, 15.0)):
                step = Step(other.bench(spec), ragged_rows(trial.page_size))
                other.problem.exact_queries(step.inputs).mul_(factor)
                other.try_step(step, frozenset({Feature.LSE}) & declared)


def _long_rows(trial: Trial) -> RigSetting:
    return replace(trial.setting, max_rows=40, max_seq_len=2560)


@check("next-batch", "split-merge", "run-again", excused=needs_feature(Feature.DETERMINISTIC))
def determinism(trial: Trial) -> None:
    """The same step gives the same bits."""
    rows = [*ragged_rows(trial.page_size), Row(300, 1), Row(200, 9), Row(2000, 1)]
    needs = frozenset({Feature.LSE}) & trial.features
    for dtype in trial.some(compute_dtypes(trial.row), 1):
        other = trial.in_dtype(dtype)
        bench = other.bench(setting=_long_rows(other))
        step = trial.step(bench, rows)
        first = other.run(step, needs)
        for repeat in range(3):
            other.run(trial.step(bench, [Row(5 + repeat, 2), Row(0, 3)], seed=repeat))
            _same_bits(trial, first, other.run(step, needs))


def _same_bits(trial: Trial, one: HostOutput, two: HostOutput, what: str = "from the same step") -> None:
    for name in ("out", "lse"):
        a, b = vars(one)[name], vars(two)[name]
        if a is not None:
            trial.require(
                torch.equal(a, b),
                f"expected the same bits {what}, got {int((a != b).sum())} numbers of {name} that differ",
            )
    for place, states in (one.kept or {}).items():
        same = two.kept is not None and all(map(torch.equal, states, two.kept[place]))
        trial.require(same, f"expected the same bits {what}, got another state behind token {place}")
    trial.progress.num_steps += 1


@check("determinism", "long-beside-short", excused=needs_feature(Feature.BATCH_INVARIANT))
def batch_invariance(trial: Trial) -> None:
    """A row gives the same bits alone and beside other rows."""
    for dtype in trial.some(compute_dtypes(trial.row), 1):
        _batch_invariance(trial.in_dtype(dtype))


def _of_tokens(answer: HostOutput, tokens: slice) -> HostOutput:
    """The part of an answer that is about some tokens."""
    kept = answer.kept and {
        place - tokens.start: state for place, state in answer.kept.items() if tokens.start <= place < tokens.stop
    }
    return HostOutput(answer.out[tokens], None if answer.lse is None else answer.lse[tokens], kept)


def _batch_invariance(trial: Trial) -> None:
    chosen = trial.some([Row(1500, 1), Row(33, 6), Row(0, 17), Row(40, 1), Row(200, 1)], 3)
    others = [Row(5, 1), Row(90, 3), Row(2000, 1), Row(0, 40)]
    needs = frozenset({Feature.LSE}) & trial.features
    bench = trial.bench(setting=_long_rows(trial))
    for index, row in enumerate(chosen):
        alone = trial.step(bench, [row], seed=index)
        first = trial.run(alone, needs)
        for before in trial.some((len(others), 0, 2), 1):
            crowd = trial.step(bench, [*others[:before], row, *others[before:]], seed=100 + before)
            start = sum(other.query_len for other in others[:before])
            place = slice(start, start + row.query_len)
            crowd.take_row(alone, place)
            crowd.contexts[before] = alone.contexts[0]
            crowd.write_contexts()
            got = trial.run(crowd, needs)
            got = _of_tokens(got, place)
            _same_bits(trial, first, got, f"from a row of {row.context_len}+{row.query_len} alone and beside others")
            for table_row in crowd.table_rows:
                bench.store.close_row(table_row)
        bench.store.close_row(alone.table_rows[0])


@check("long-beside-short", "dtypes", kinds=ENTRY_KINDS)
def each_key_once(trial: Trial) -> None:
    """Each of a thousand keys is seen exactly once, in every dtype."""
    # All keys weigh the same. Each element of a head looks for one key: its value is the number of keys (or the largest
    # value that the cache can hold) there, and 0 elsewhere.
    length = 1100
    for dtype in compute_dtypes(trial.row):
        other = trial.in_dtype(dtype)
        step = Step(other.bench(setting=_long(other, length)), [Row(length - 3, 3)])
        step.weigh_alike()
        other.problem.new_values(step.inputs).zero_()
        values = other.problem.values(step.spec, step.contexts[0])
        per_step = values[0].numel()
        peak = min(float(length), torch.finfo(other.cache_dtype).max)
        for start in trial.some(range(0, length, per_step), 4):
            values.zero_()
            for place, key in enumerate(range(start, min(start + per_step, length - 3))):
                values[key].view(-1)[place] = peak
            step.write_contexts()
            other.try_step(step)
