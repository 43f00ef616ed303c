"""Features: each that a row declares, alone and then together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from sightline.attention.spec import AttentionSpec, Feature, SpecKind
from sightline.cache.layout import Layout
from sightline.core.batch import CAUSAL, FULL, MaskKind, RowMask
from sightline.testing.conformance.rig import Row, Unused
from sightline.testing.conformance.steps import Step
from sightline.testing.conformance.trees import tree_row
from sightline.testing.conformance.trial import Check, Trial, masked, needs_feature, ragged_rows

LSE = frozenset({Feature.LSE})
_PARENTS = (
    (-1, 0, 0, 1, 2),
    (-1, 0, 1, 1, 1, 0, 5, 6),
    (-1, -1, 0, 1),
)
"""Trees: the parent of each new token, -1 for one that follows the context."""
_BLIND = RowMask(MaskKind.TREE, torch.tensor([[True, False], [False, False]]))
"""The second query sees nothing of the step, not even itself."""


def _tree_rows(page: int) -> list[Row]:
    return [tree_row(page + 4, _PARENTS[0]), Row(3, 1), tree_row(0, _PARENTS[1]), tree_row(page - 1, _PARENTS[2])]


def scale(trial: Trial) -> None:
    for factor in trial.some((0.4, 1.7)):
        trial.try_rows(ragged_rows(trial.page_size), replace(trial.plain, scale=trial.plain.scale * factor))


def grouped_heads(trial: Trial) -> None:
    for size in trial.some(trial.samples.of_group_sizes(trial.row), 3):
        for kv_heads in (1, 3, 8):
            spec = replace(trial.plain, num_q_heads=size * kv_heads, num_kv_heads=kv_heads)
            trial.try_rows([Row(20, 1), Row(3, 1), Row(0, 4), Row(7, 3)], spec)


def head_dims(trial: Trial) -> None:
    for head_dim in trial.samples.of_head_dims(trial.row):
        trial.try_rows([Row(20, 1), Row(3, 1), Row(0, 4), Row(7, 3)], trial.sized(head_dim))


def window(trial: Trial) -> None:
    page = trial.page_size
    for size in trial.some((page // 2 + 1, 1, 2, page, 2 * page + 3), 3):
        spec = replace(trial.plain, window=size)
        trial.try_rows(ragged_rows(page), spec)
        around = [Row(max(size + delta, 0), 1) for delta in (-2, -1, 0, 1, 2)]
        trial.try_rows([*around, Row(0, size), Row(0, size + 1), Row(size, 3)], spec)


def softcap(trial: Trial) -> None:
    for cap in trial.some((2.0, 0.5, 30.0)):
        trial.try_rows(ragged_rows(trial.page_size), replace(trial.plain, softcap=cap))


def sinks(trial: Trial) -> None:
    trial.try_rows(ragged_rows(trial.page_size), replace(trial.plain, sinks=True))


def non_causal(trial: Trial) -> None:
    page = trial.page_size
    rows = [Row(5, 12, FULL), Row(0, 2 * page + 1, FULL), Row(page + 1, 1, FULL), Row(3, 2)]
    trial.try_rows(rows)
    fresh = [Row(0, length, FULL) for length in (5, 1, page + 3)]
    trial.try_step(Step(trial.bench(), fresh, transient=True))
    if Feature.WINDOW in trial.features:
        trial.try_rows(rows, replace(trial.plain, window=4))
    bench = trial.bench()
    for kinds in ((FULL, CAUSAL), (CAUSAL, FULL), (FULL, FULL)):
        trial.try_step(Step(bench, [Row(3, 4, mask) for mask in kinds]))


def tree_mask(trial: Trial) -> None:
    trial.try_rows(_tree_rows(trial.page_size))
    trial.try_rows([Row(0, 2, _BLIND), Row(2, 2, _BLIND)])
    # Trees of more tokens than a word has bits, and one whose tokens stand before their parents.
    trial.try_rows([tree_row(5, [index // 2 - (index % 3 == 0) for index in range(70)]), tree_row(0, [-1] * 33)])
    backwards = RowMask(MaskKind.TREE, torch.ones(5, 5, dtype=torch.bool).triu())
    trial.try_rows([Row(4, 5, backwards), Row(3, 1)])
    # On one bench: other trees of the same sizes, in other places, and under TRANSIENT.
    bench = trial.bench()
    for seed, parents in enumerate(((-1, 0, 1, 2), (-1, 0, 0, 0), (-1, -1, -1, 0))):
        rows = [tree_row(3, parents), Row(2, 4)]
        trial.try_step(Step(bench, rows, seed=seed))
        trial.try_step(Step(bench, rows[::-1], seed=seed))
        trial.try_step(Step(bench, [tree_row(0, parents), Row(0, 4)], seed=seed, transient=True))


def lse(trial: Trial) -> None:
    step = Step(trial.bench(), ragged_rows(trial.page_size))
    plain = trial.try_step(step)
    trial.require(plain.lse is None, "expected no LSE from a step that does not need one, got a tensor")
    step = Step(trial.bench(), ragged_rows(trial.page_size))
    answer = trial.try_step(step, LSE)
    trial.require(answer.lse is not None, "expected the LSE from a step that needs it, got None")
    if answer.lse is not None:
        trial.require(answer.lse.dtype == torch.float32, f"expected the LSE in float32, got {answer.lse.dtype}")
    bench = trial.bench()
    for seed in range(4):
        trial.try_step(Step(bench, [Row(3, 2), Row(0, 3)], seed=seed), LSE if seed % 2 else frozenset())
    fresh = [Row(0, length) for length in (1, 7, trial.page_size + 1)]
    trial.try_step(Step(trial.bench(), fresh, transient=True), LSE)


def features_together(trial: Trial) -> None:
    declared = trial.features
    page = trial.page_size
    setting = replace(trial.setting, layout=Layout.SHUFFLED, unused=Unused.NAN)
    rows = ragged_rows(page)
    kinds = [rows]
    if Feature.NON_CAUSAL in declared:
        kinds.append([*masked(rows[:4], mask=FULL), *rows[4:]])
    if Feature.TREE_MASK in declared:
        kinds.append([*_tree_rows(page), *rows[:4], Row(0, 2, _BLIND)])
    needs = LSE & declared
    for spec in _combinations(trial):
        for kind in kinds:
            trial.try_rows(kind, spec, setting)
            if needs:
                trial.try_rows(kind, spec, setting, needs)


def _combinations(trial: Trial) -> tuple[AttentionSpec, ...]:
    """Specs with everything that is declared, and with every pair."""
    declared = trial.features
    changes: dict[Feature, dict[str, object]] = {
        Feature.WINDOW: {"window": trial.page_size // 2 + 1},
        Feature.SOFTCAP: {"softcap": 1.5},
        Feature.SINKS: {"sinks": True},
    }
    able = [change for feature, change in changes.items() if feature in declared]
    specs = []
    for dropped in range(len(able) + 1):
        spec = trial.plain
        for index, change in enumerate(able):
            if index != dropped:
                spec = replace(spec, **change)
        specs.append(spec)
    return trial.some(specs[::-1])


def _feature(feature: Feature, proves: str, run: Callable[[Trial], None], *after: str) -> Check:
    return Check(feature.value, proves, run, ("ragged", *after), needs_feature(feature))


CHECKS = (
    Check("scale", "scores are scaled as the spec says", scale, ("ragged",)),
    Check(
        "grouped-heads",
        "query head h reads key head h // group size, for every declared size",
        grouped_heads,
        ("ragged",),
        kinds=frozenset({SpecKind.SOFTMAX}),
    ),
    Check("head-dims", "every declared head dimension", head_dims, ("ragged",)),
    _feature(Feature.WINDOW, "a query sees keys less than the window away, at its border and beyond", window),
    _feature(Feature.SOFTCAP, "scores are capped", softcap),
    _feature(Feature.SINKS, "sinks take weight and give no value", sinks),
    _feature(
        Feature.NON_CAUSAL, "rows with a full mask, within a symmetric window too", non_causal, "window", "transient"
    ),
    _feature(
        Feature.TREE_MASK,
        "trees: a token sees its ancestors; one that sees nothing gives 0",
        tree_mask,
        "long-prompts",
        "transient-in-turn",
    ),
    _feature(Feature.LSE, "the natural log-sum-exp, where it is asked for and only there", lse, "transient"),
    Check(
        "features-together",
        "all declared features at once, and by pairs, on shuffled pages with NaN in unused slots",
        features_together,
        (
            "page-order",
            "unused-slots",
            "scale",
            *(feature.value for feature in Feature if feature not in (Feature.DETERMINISTIC, Feature.BATCH_INVARIANT)),
        ),
    ),
)
