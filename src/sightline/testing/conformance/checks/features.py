"""Features: each one that a row declares alone, then all together."""

from __future__ import annotations

from dataclasses import replace

import torch

from sightline.attention.kinds import CHOOSING_KINDS, ENTRY_KINDS, PAGED_KINDS, RECURRENT_ONLY, Feature, SpecKind
from sightline.attention.spec import AttentionSpec
from sightline.cache.layout import Layout
from sightline.core.batch import CAUSAL, FULL, MaskKind, RowMask
from sightline.testing.conformance.rig import Row, Unused, tree_row
from sightline.testing.conformance.steps import Step
from sightline.testing.conformance.trial import Trial, check, masked, needs_feature, ragged_rows

LSE = frozenset({Feature.LSE})
_TOGETHER = sorted(
    set(Feature) - RECURRENT_ONLY - {Feature.DETERMINISTIC, Feature.BATCH_INVARIANT}, key=lambda each: each.value
)
"""Features that have a check of their own, by the feature's name."""
_PARENTS = (
    (-1, 0, 0, 1, 2),
    (-1, 0, 1, 1, 1, 0, 5, 6),
    (-1, -1, 0, 1),
)
"""The parent of each new token of a tree; -1 for one that follows the context."""
BLIND = RowMask(MaskKind.TREE, torch.tensor([[True, False], [False, False]]))
"""The second query sees none of the new tokens, not even itself."""


def tree_rows(page: int) -> list[Row]:
    return [tree_row(page + 4, _PARENTS[0]), Row(3, 1), tree_row(0, _PARENTS[1]), tree_row(page - 1, _PARENTS[2])]


@check("ragged", kinds=frozenset(SpecKind) - CHOOSING_KINDS - {SpecKind.CONVOLUTION})
def scale(trial: Trial) -> None:
    """Scores are scaled as the spec says."""
    for factor in trial.some((0.4, 1.7)):
        trial.try_rows(ragged_rows(trial.page_size), replace(trial.plain, scale=trial.plain.scale * factor))


@check("ragged", kinds=frozenset({SpecKind.SOFTMAX}))
def grouped_heads(trial: Trial) -> None:
    """Query head h reads key head h // group size, for every declared group size."""
    for size in trial.some(trial.samples.of_group_sizes(trial.row), 3):
        for kv_heads in (1, 3, 8):
            spec = replace(trial.plain, num_q_heads=size * kv_heads, num_kv_heads=kv_heads)
            trial.try_rows([Row(20, 1), Row(3, 1), Row(0, 4), Row(7, 3)], spec)


@check("ragged")
def head_dims(trial: Trial) -> None:
    """Every declared head dimension works."""
    for head_dim in trial.samples.of_head_dims(trial.row):
        trial.try_rows([Row(20, 1), Row(3, 1), Row(0, 4), Row(7, 3)], trial.sized(head_dim))


@check("ragged", excused=needs_feature(Feature.WINDOW), kinds=ENTRY_KINDS)
def window(trial: Trial) -> None:
    """A query sees the keys that are less than the window away, and no others."""
    page = trial.page_size
    for size in trial.some((page // 2 + 1, 1, 2, page, 2 * page + 3), 3):
        spec = replace(trial.plain, window=size)
        trial.try_rows(ragged_rows(page), spec)
        around = [Row(max(size + delta, 0), 1) for delta in (-2, -1, 0, 1, 2)]
        trial.try_rows([*around, Row(0, size), Row(0, size + 1), Row(size, 3)], spec)


@check("ragged", excused=needs_feature(Feature.SOFTCAP), kinds=ENTRY_KINDS)
def softcap(trial: Trial) -> None:
    """Scores are capped as the spec says."""
    for cap in trial.some((2.0, 0.5, 30.0)):
        trial.try_rows(ragged_rows(trial.page_size), replace(trial.plain, softcap=cap))


@check("ragged", excused=needs_feature(Feature.SINKS), kinds=ENTRY_KINDS)
def sinks(trial: Trial) -> None:
    """Sinks take weight and contribute no value."""
    trial.try_rows(ragged_rows(trial.page_size), replace(trial.plain, sinks=True))


@check("ragged", "window", "transient", excused=needs_feature(Feature.NON_CAUSAL), kinds=PAGED_KINDS)
def non_causal(trial: Trial) -> None:
    """Rows with a full mask see all their new tokens, within a symmetric window if there is one."""
    page = trial.page_size
    rows = [Row(5, 12, FULL), Row(0, 2 * page + 1, FULL), Row(page + 1, 1, FULL), Row(3, 2)]
    trial.try_rows(rows)
    fresh = [Row(0, length, FULL) for length in (5, 1, page + 3)]
    trial.try_step(trial.step(trial.bench(), fresh, transient=True))
    if Feature.WINDOW in trial.features:
        trial.try_rows(rows, replace(trial.plain, window=4))
    bench = trial.bench()
    for kinds in ((FULL, CAUSAL), (CAUSAL, FULL), (FULL, FULL)):
        trial.try_step(trial.step(bench, [Row(3, 4, mask) for mask in kinds]))


@check(
    "ragged long-prompts transient-in-turn nothing-to-choose",
    excused=needs_feature(Feature.TREE_MASK),
    kinds=PAGED_KINDS,
)
def tree_mask(trial: Trial) -> None:
    """In a tree, a token sees its ancestors; the output of a token that sees nothing is 0."""
    trial.try_rows(tree_rows(trial.page_size))
    trial.try_rows([Row(0, 2, BLIND), Row(3, 2, BLIND)])
    # Trees with more tokens than a word has bits, and one whose tokens come before their parents.
    trial.try_rows([tree_row(5, [index // 2 - (index % 3 == 0) for index in range(70)]), tree_row(0, [-1] * 33)])
    backwards = RowMask(MaskKind.TREE, torch.ones(5, 5, dtype=torch.bool).triu())
    trial.try_rows([Row(4, 5, backwards), Row(3, 1)])
    # On one rig: other trees of the same sizes, in other places, and under TRANSIENT.
    bench = trial.bench()
    for seed, parents in enumerate(((-1, 0, 1, 2), (-1, 0, 0, 0), (-1, -1, -1, 0))):
        rows = [tree_row(3, parents), Row(2, 4)]
        trial.try_step(trial.step(bench, rows, seed=seed))
        trial.try_step(trial.step(bench, rows[::-1], seed=seed))
        trial.try_step(trial.step(bench, [tree_row(0, parents), Row(0, 4)], seed=seed, transient=True))


@check("ragged", "transient", excused=needs_feature(Feature.LSE), kinds=ENTRY_KINDS)
def lse(trial: Trial) -> None:
    """A step returns the natural log-sum-exp exactly if it is needed."""
    for needs in (frozenset[Feature](), LSE):
        trial.try_rows(ragged_rows(trial.page_size), needs=needs)
    bench = trial.bench()
    for seed in range(4):
        trial.try_step(Step(bench, [Row(3, 2), Row(0, 3)], seed=seed), LSE if seed % 2 else frozenset())
    fresh = [Row(0, length) for length in (1, 7, trial.page_size + 1)]
    trial.try_step(Step(trial.bench(), fresh, transient=True), LSE)


@check("page-order", "unused-slots", "scale", *(feature.value for feature in _TOGETHER), kinds=PAGED_KINDS)
def features_together(trial: Trial) -> None:
    """All declared features work together, and in pairs, on shuffled pages with NaN in unused slots."""
    declared = trial.features
    page = trial.page_size
    setting = replace(trial.setting, layout=Layout.SHUFFLED, unused=Unused.NAN)
    rows = ragged_rows(page)
    kinds = [rows]
    if Feature.NON_CAUSAL in declared:
        kinds.append([*masked(rows[:4], mask=FULL), *rows[4:]])
    if Feature.TREE_MASK in declared:
        kinds.append([*tree_rows(page), *rows[:4], Row(0, 2, BLIND)])
    needs = LSE & declared
    for spec in _combinations(trial):
        for kind in kinds:
            trial.try_rows(kind, spec, setting)
            if needs:
                trial.try_rows(kind, spec, setting, needs)


def _combinations(trial: Trial) -> tuple[AttentionSpec, ...]:
    """Returns specs with all declared features, and with every pair."""
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
