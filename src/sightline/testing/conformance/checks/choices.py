"""Indexers: the tokens with the highest scores are chosen, of equal ones those at lower places.

All other checks compare choices with the oracle's too, except where scores are as close as rounding. For ties, all
numbers are small integers, so that there is only one right choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.oracle.dtypes import compute_dtypes, scaled_dtypes
from sightline.cache.layout import Layout
from sightline.core.batch import FULL
from sightline.testing.conformance.checks.features import tree_rows
from sightline.testing.conformance.index_steps import IndexStep
from sightline.testing.conformance.rig import AttentionRig, Row, Subject
from sightline.testing.conformance.trial import Trial, check, ragged_rows

_INDEX = frozenset({SpecKind.INDEX})
_TOP_KS = (8, 1, 33, 64)
_UNIFORM = ((-1.0, 1.0), (-1.0, -1.0), (1.0, 1.0), (1.0, -1.0), (1.0, 0.0))
"""(query, weight) for keys of ones: products that are all cut off at 0, times weights of either sign, and products that
are all alike."""
_SIZES = (1.0, 16.0, 2.0**-9, 300.0, 0.0, 0.25)
"""Sizes of the keys of neighbouring tokens."""


def _rows(page: int) -> list[Row]:
    return [*ragged_rows(page), Row(70, 1), Row(150, 3), Row(0, 66)]


@check("ragged", kinds=_INDEX)
def choice(trial: Trial) -> None:
    """Any number of tokens can be chosen: as many places as a query sees, or as are asked for, in increasing order."""
    for top_k in trial.some(_TOP_KS):
        trial.try_rows(_rows(trial.page_size), replace(trial.plain, top_k=top_k))
    for top_k in trial.some((9, 32, trial.page_size)):
        spec = replace(trial.plain, top_k=top_k)
        around = [Row(max(top_k + delta - 1, 0), 1) for delta in (-2, -1, 0, 1, 2)]
        for rows in ([around[3]], around, [*around, Row(3 * top_k, 2)], [Row(0, top_k + 1)]):
            trial.try_rows(rows, spec)


@check("choice", "padding", "transient", kinds=_INDEX)
def nothing_to_choose(trial: Trial) -> None:
    """If no row has more tokens than are chosen, a step keeps the keys and writes no choice."""
    spec = replace(trial.plain, top_k=32)
    bench = trial.bench(spec)
    for rows in ([Row(0, 32), Row(31, 1), Row(3, 2)], [Row(5, 1)]):
        step = trial.step(bench, rows)
        step.pad(1, 2, torch.nan)
        trial.try_step(step)
        # The next step reads those keys.
        trial.try_step(step.next_step(40, seed=3))
        for table_row in step.table_rows:
            bench.store.close_row(table_row)
    trial.try_step(trial.step(trial.bench(spec), [Row(0, 32), Row(0, 5)], transient=True))


@check("choice transient dtypes page-sizes tree-mask non-causal layers", kinds=_INDEX)
def ties(trial: Trial) -> None:
    """Of tokens with equal scores, those at lower places are chosen, also if all scores are 0, of either sign."""
    rows = _rows(trial.page_size)
    rows += [Row(20, 6, FULL), Row(0, 9, FULL)] if Feature.NON_CAUSAL in trial.features else []
    rows += tree_rows(trial.page_size) if Feature.TREE_MASK in trial.features else []
    for dtype in compute_dtypes(trial.row):
        other = trial.in_dtype(dtype)
        for top_k in trial.some(_TOP_KS):
            bench = _bench(other, top_k, other.page_size)
            other.try_step(_exact(IndexStep(bench, rows, seed=top_k, layer=1)))
            other.try_step(_exact(IndexStep(_bench(other, top_k), [Row(0, 70), Row(0, 3)], transient=True)))
    for page_size in trial.some(trial.samples.of_page_sizes(trial.row)):
        trial.try_step(_exact(IndexStep(_bench(trial, 12, page_size), rows, layer=1)))
    for top_k, (query, weight) in zip((8, 1, 8, 64, 8), _UNIFORM, strict=True):
        step = IndexStep(_bench(trial, top_k), rows)
        step.contexts = [tuple(torch.ones_like(plane) for plane in context) for context in step.contexts]
        step.inputs.key.fill_(1.0)
        step.inputs.q.fill_(query)
        step.inputs.weights.fill_(weight)
        step.become_exact()
        trial.try_step(step)


@check("ties", "unused-slots", kinds=_INDEX)
def nan_scores(trial: Trial) -> None:
    """A score that is NaN counts as the highest, so that a spoiled key reaches the output instead of being left out."""
    for top_k, spoiled in ((8, slice(5, None, 11)), (2, slice(1, None, 3)), (33, slice(0, 1))):
        step = IndexStep(_bench(trial, top_k), _rows(trial.page_size), layer=1)
        step.make_exact()
        for context in step.contexts:
            context[0][spoiled] = torch.nan
        step.write_contexts()
        trial.try_step(step)


def _bench(trial: Trial, top_k: int, page_size: int | None = None) -> AttentionRig:
    """A rig of two layers with shuffled pages."""
    page_size = page_size or trial.page_size
    setting = replace(
        trial.setting,
        page_size=page_size,
        layout=Layout.SHUFFLED,
        max_rows=24,
        max_seq_len=max(512, 8 * page_size),
        max_step_tokens=max(512, 8 * page_size),
    )
    spec = replace(trial.plain, top_k=top_k)
    return trial.bench(spec, spec, setting=setting)


def _exact(step: IndexStep) -> IndexStep:
    step.make_exact()
    return step


def _not_declared(subject: Subject) -> str | None:
    return None if scaled_dtypes(subject.capability) else "no keys of 8 bits are declared"


@check("ties", "cache-dtypes", "page-order", "read-back", excused=_not_declared, kinds=_INDEX)
def key_scales(trial: Trial) -> None:
    """8-bit keys are kept with a scale for each token, the least power of two that fits, and read with their own."""
    for cache_dtype in scaled_dtypes(trial.row):
        for dtype in compute_dtypes(trial.row):
            other = trial.in_dtype(dtype, cache_dtype)
            # The largest numbers of half precision are far below those of the others.
            large = 2.0**5 if dtype is torch.float16 else 2.0**24
            for sizes in (_SIZES, [2.0**-12 * size for size in _SIZES], [large * size for size in _SIZES]):
                step = IndexStep(_bench(other, 8), _rows(trial.page_size), layer=1)
                _spread(step, sizes)
                other.try_step(step)
                other.try_step(step.next_step(2, seed=1))


def _spread(step: IndexStep, sizes: Sequence[float]) -> None:
    """Gives neighbouring tokens keys of very different sizes, some of them 0."""
    powers = torch.tensor(sizes)
    for keys in (step.inputs.key, *(context[0] for context in step.contexts)):
        factors = powers[torch.arange(keys.shape[0]) % len(powers)].unsqueeze(1)
        keys.copy_((keys.float() * factors).to(keys.dtype))
    step.write_contexts()
