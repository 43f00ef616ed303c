"""Random steps: everything that a row declares, thrown together by a seed that the failure names."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from sightline.attention.spec import Feature
from sightline.core.batch import CAUSAL, FULL, RowMask
from sightline.testing.bench import SCALES, Layout, Memory, Row, Setting, Unused
from sightline.testing.checks.features import LSE, tree_row
from sightline.testing.steps import Step
from sightline.testing.trial import Check, CheckFailed, Effort, Trial, compute_dtypes, fail, scaled_dtypes

_NUM_SPECS = {Effort.QUICK: 8, Effort.FULL: 40}
_SEEDS_OF_A_SPEC = {Effort.QUICK: 1, Effort.FULL: 3}
"""A backend may compile kernels for a spec, which takes seconds: each is tried with several seeds."""


def random_steps(trial: Trial) -> None:
    count = _SEEDS_OF_A_SPEC[trial.effort]
    for number in trial.share.of(range(_NUM_SPECS[trial.effort])):
        for seed in range(number * count, (number + 1) * count):
            try:
                _try_seed(trial, number, seed)
            except CheckFailed as failure:
                fail(f"spec {number}, seed {seed}: {failure}")


def _try_seed(trial: Trial, number: int, seed: int) -> None:
    """A few steps in turn on one bench, the same rows going on between them."""
    of_spec, draw = random.Random(f"spec {number}"), random.Random(f"steps {seed}")
    # Every fourth on a cache with scales, where one is declared.
    cache_dtype = next(iter(scaled_dtypes(trial.row)), None) if number % 4 == 3 else None
    other = trial.in_dtype(of_spec.choice(compute_dtypes(trial.row)), cache_dtype)
    spec = _spec(other, of_spec)
    setting = _setting(other, draw, of_spec.choice(trial.samples.of_page_sizes(trial.row)))
    bench = other.bench(spec, setting=setting)
    needs = LSE & trial.features if of_spec.random() < 0.3 else frozenset[Feature]()
    step = Step(bench, _rows(trial, draw, setting.page_size), seed=seed)
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.6:
            step.pad(draw.randint(0, 2), draw.randint(0, 5), float("nan"))
        other.try_step(step, needs)
        step = step.next_step(draw.choice([1, 1, 1, 2, 5]), seed=seed + 1000)
    if draw.random() < 0.3:
        fresh = [replace(row, context_len=0, positions=None) for row in _rows(trial, draw, setting.page_size)]
        plain = [row if row.mask.tree is None else Row(0, row.query_len) for row in fresh]
        other.try_step(Step(bench, plain, seed=seed, transient=True), needs)


def _spec(trial: Trial, draw: random.Random) -> Any:
    declared = trial.features
    head_dim = draw.choice(trial.samples.of_head_dims(trial.row)[:4])
    kv_heads = draw.randint(1, 3)

    def wants(feature: Feature) -> bool:
        return feature in declared and draw.random() < 0.4

    spec = trial.problem.spec(head_dim, draw.choice(trial.samples.of_group_sizes(trial.row)[:5]), kv_heads)
    spec = replace(spec, scale=spec.scale * draw.uniform(0.5, 1.5))
    if wants(Feature.WINDOW):
        spec = replace(spec, window=draw.randint(1, 40))
    if wants(Feature.SOFTCAP):
        spec = replace(spec, softcap=draw.uniform(0.5, 10.0))
    return replace(spec, sinks=True) if wants(Feature.SINKS) else spec


def _setting(trial: Trial, draw: random.Random, page_size: int) -> Setting:
    return replace(
        trial.setting,
        page_size=page_size,
        layout=draw.choice(list(Layout)),
        unused=Unused.NAN,
        memory=Memory.POISON,
        cache_scales=SCALES,
        paranoid=draw.random() < 0.3,
        max_seq_len=max(512, 8 * page_size),
    )


def _rows(trial: Trial, draw: random.Random, page: int) -> list[Row]:
    rows = []
    for _ in range(draw.randint(1, 9)):
        context_len = draw.choice([0, 0, 1, page - 1, page, page + 1, draw.randint(0, 120)])
        if Feature.TREE_MASK in trial.features and draw.random() < 0.3:
            rows.append(tree_row(context_len, [draw.randint(-1, index - 1) for index in range(draw.randint(1, 7))]))
            continue
        rows.append(Row(context_len, draw.choice([1, 1, 1, 2, 7, draw.randint(1, 30)]), _mask(trial, draw)))
    return rows


def _mask(trial: Trial, draw: random.Random) -> RowMask:
    return FULL if Feature.NON_CAUSAL in trial.features and draw.random() < 0.2 else CAUSAL


CHECKS = (
    Check(
        "random-steps",
        "seeded random steps over everything that is declared, several in turn, padded, shuffled and poisoned",
        random_steps,
        ("pairs", "next-batch", "ways-in-turn", "padding", "zeroed-leases", "filled-buffers"),
        num_shares=8,
    ),
)
