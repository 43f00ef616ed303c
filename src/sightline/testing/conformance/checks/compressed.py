"""Compressed attention: which tokens make an entry, who sees it, and what is kept of windows that are not complete."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from sightline.attention.compressed.spec import Compression
from sightline.attention.kinds import COMPRESSED_KINDS, Feature, SpecKind
from sightline.attention.oracle.dtypes import compute_dtypes
from sightline.cache.layout import Layout
from sightline.core.page_shape import fits
from sightline.testing.conformance.rig import Row, Subject, Unused
from sightline.testing.conformance.state_steps import StateStep
from sightline.testing.conformance.trial import Trial, check, needs_feature

_ATTENTION = frozenset({SpecKind.COMPRESSED})
_INDEX = frozenset({SpecKind.COMPRESSED_INDEX})
_RATIOS = ((4, True), (4, False), (16, False), (128, True))
_PIECES = (3, 1, 1, 2, 5, 1, 4, 66, 1)
"""Tokens of steps that follow each other: some have fewer than a window, and some end where a window does."""
_TOP_KS = (3, 1, 7, 16)


def _compressing(trial: Trial, ratio: int, *, overlap: bool) -> Any:
    """Returns the plain spec with other entries."""
    rope_dim = trial.plain.compression.rope_dim
    return replace(trial.plain, compression=Compression(ratio, overlap, rope_dim, norm_eps=1e-6))


def _specs(trial: Trial) -> Iterator[Any]:
    for ratio, overlap in trial.some([each for each in _RATIOS if fits(trial.page_size, each[0])], 3):
        yield _compressing(trial, ratio, overlap=overlap)


@check("ragged", kinds=COMPRESSED_KINDS)
def entries(trial: Trial) -> None:
    """An entry is made of the tokens of its window, and with overlap of the one before it, and a token that completes
    it, and all behind it, see it."""
    for spec in _specs(trial):
        ratio = spec.compression.ratio
        around = [Row(max(0, ratio * count + delta), 1) for count in (1, 2) for delta in (-2, -1, 0)]
        trial.try_rows(around, spec)
        trial.try_rows([Row(0, ratio - 1), Row(0, ratio), Row(0, 2 * ratio + 1), Row(ratio - 1, 3)], spec)
        trial.try_rows([Row(2 * ratio - 1, 1), Row(0, 3), Row(ratio, ratio + 2)], spec)


@check("entries", "kept-places", "guesses", "padding", "next-batch", kinds=COMPRESSED_KINDS)
def cut_anywhere(trial: Trial) -> None:
    """A text may be cut anywhere, also inside a window: each step goes on where the one before it stopped."""
    for spec in _specs(trial):
        for first in (0, 5):
            step: StateStep = trial.state_step(trial.bench(spec), (Row(first, 2), Row(first, 2), Row(0, 1)))
            trial.try_step(step)
            for seed, count in enumerate(trial.some(_PIECES, 6)):
                news = [count, *(1 + (count + place) % 5 for place in (1, 2))]
                rows = [Row(row.seq_len, new) for row, new in zip(step.rows, news, strict=True)]
                step = step.following(rows, seed=seed)
                step.pad(1, 4, torch.nan)
                trial.try_step(step)


@check("cut-anywhere", kinds=COMPRESSED_KINDS)
def refused_guesses(trial: Trial) -> None:
    """What refused guesses wrote, entries among it, is never read."""
    for spec in _specs(trial):
        for context in trial.some((spec.compression.ratio - 2, 9, 2 * spec.compression.ratio - 1), 2):
            rows = (Row(context, 6, candidates=6), Row(3, 1), Row(context + 1, 4, candidates=4))
            step = trial.compressed_step(trial.bench(spec), rows)
            trial.try_step(step)
            following = step.accepted((1, 1, 2), 3, seed=1)
            trial.try_step(following)
            trial.try_step(following.next_step(7, seed=2))


@check("entries", "state-rows", kinds=COMPRESSED_KINDS)
def entry_pages(trial: Trial) -> None:
    """Entries are found in pages of every size and order, also where an entry stands for more tokens than a page."""
    rows = [Row(37, 1), Row(0, 40), Row(15, 9), Row(130, 3), Row(127, 1), Row(2, 1)]
    for layout in (Layout.SHUFFLED, Layout.DESCENDING):
        for page_size in trial.some(trial.samples.of_page_sizes(trial.row), 3):
            setting = replace(trial.setting, page_size=page_size, layout=layout, unused=Unused.NAN)
            for spec in (each for each in _specs(trial) if fits(page_size, each.compression.ratio)):
                trial.try_rows(rows, spec, setting)


@check("entries", kinds=_ATTENTION)
def key_windows(trial: Trial) -> None:
    """A query sees the tokens that are less than the window away, each once, also those that an entry stands for."""
    for window in trial.some((1, 2, 5, 16, 40, 128), 4):
        spec = replace(trial.plain, window=window)
        around = [Row(max(window + delta, 0), 1) for delta in (-2, -1, 0, 1, 2)]
        trial.try_rows([*around, Row(0, window), Row(0, window + 1), Row(window, 3), Row(3 * window, 7)], spec)
        trial.try_rows([*around, Row(0, window + 3), Row(2 * window, 2)], replace(spec, compression=None))


@check("ragged", kinds=_ATTENTION)
def sink_weights(trial: Trial) -> None:
    """A sink adds to the denominator alone, however large or small it is."""
    for logit in trial.some((0.0, -60.0, 8.0, 60.0), 4):
        step = trial.step(trial.bench(), [Row(0, 1), Row(9, 1), Row(30, 5), Row(0, 12)])
        step.inputs.sinks.fill_(logit)
        step.inputs.sinks[0] = 2.0
        trial.try_step(step)


@check("entries", kinds=COMPRESSED_KINDS)
def gates(trial: Trial) -> None:
    """Gates far from each other, and of tokens that do not count at all, give the right entries."""
    for shift in (60.0, -60.0):
        step = trial.state_step(trial.bench(), [Row(9, 1), Row(0, 14), Row(6, 9)])
        gates = step.inputs.entries.gates
        gates[::3] += shift
        gates[1::5] = -torch.inf
        trial.try_step(step)


@check("entries", excused=needs_feature(Feature.SPARSE), kinds=_ATTENTION)
def chosen_numbers(trial: Trial) -> None:
    """A query attends to its window and to the entries that were chosen for it, and to no others."""
    for top_k in trial.some(_TOP_KS, 3):
        spec = replace(trial.plain, top_k=top_k)
        ratio = spec.compression.ratio
        around = [Row(max(top_k * ratio + delta, 0), 1) for delta in (-2, -1, 0, 1)]
        for rows in ([*around, Row(3 * top_k * ratio, 2)], [Row(0, (top_k + 3) * ratio), Row(1, 1)], [Row(2, 1)]):
            trial.try_rows(rows, spec)
        fresh = [Row(0, (top_k + 2) * ratio), Row(0, 1), Row(0, 9)]
        trial.try_step(trial.step(trial.bench(spec), fresh, transient=True))


def _reads_the_device(subject: Subject) -> str | None:
    return None if subject.capability.hot_entries else "no entries in host memory are declared"


@check("chosen-numbers", "refused-guesses", "entry-pages", excused=_reads_the_device, kinds=_ATTENTION)
def hot_entries(trial: Trial) -> None:
    """Entries in host memory give the same answers, with as few hot ones as a query chooses and with more: those of
    other steps, those that this one completes, and none that a refused guess left."""
    for top_k, per_choice in trial.some(((3, 1), (5, 3), (1, 1), (16, 2)), 1):
        spec = replace(trial.plain, top_k=top_k)
        ratio = spec.compression.ratio
        setting = replace(trial.setting, hot_per_choice=per_choice, layout=Layout.SHUFFLED, unused=Unused.NAN)
        rows = (Row(9 * ratio, 3), Row(2, 1), Row(5 * ratio + 1, 20))
        step: StateStep = trial.compressed_step(trial.bench(spec, setting=setting), rows)
        trial.try_step(step)
        for seed, news in enumerate(((1, 1, 1), (2, 17, 1), (1, 1, 1), (1, 3, 18))):
            following = [Row(row.seq_len, new) for row, new in zip(step.rows, news, strict=True)]
            step = step.following(following, seed=seed)
            step.pad(1, 2, torch.nan)
            trial.try_step(step)
        guesses = (Row(8 * ratio - 1, 6, candidates=6), Row(7, 1), Row(6 * ratio, 4, candidates=4))
        guessing = trial.compressed_step(trial.bench(spec, setting=setting), guesses)
        trial.try_step(guessing)
        accepted = guessing.accepted((1, 1, 2), 1, seed=5)
        trial.try_step(accepted)
        trial.try_step(accepted.next_step(1, seed=6))


@check("entries", kinds=_INDEX)
def chosen_entries(trial: Trial) -> None:
    """The entries with the highest scores are chosen, in increasing order; of equal ones the earlier."""
    for top_k in trial.some(_TOP_KS, 3):
        spec = replace(trial.plain, top_k=top_k)
        ratio = spec.compression.ratio
        around = [Row(max(top_k * ratio + delta, 0), 1) for delta in (-2, -1, 0, 1)]
        for rows in ([*around, Row(3 * top_k * ratio, 2)], [Row(0, (top_k + 3) * ratio), Row(1, 1)], [Row(2, 1)]):
            trial.try_rows(rows, spec)
            step = trial.step(trial.bench(spec), rows)
            step.inputs.weights.zero_()
            trial.try_step(step)
        fresh = [Row(0, (top_k + 2) * ratio), Row(0, 1), Row(0, 9)]
        trial.try_step(trial.step(trial.bench(spec), fresh, transient=True))


@check(
    "cut-anywhere refused-guesses entry-pages key-windows sink-weights gates chosen-numbers chosen-entries "
    "poisoned-slots dtypes transient",
    kinds=COMPRESSED_KINDS,
)
def compressed_together(trial: Trial) -> None:
    """Everything works together in every dtype, in shuffled pages and slots beside NaN, and without a cache."""
    kept = (Row(9, 1), Row(0, 1), Row(3, 7), Row(0, 11, checkpoints=(2, 6)), Row(20, 5, candidates=5), Row(0, 70))
    for dtype in compute_dtypes(trial.row):
        other = trial.in_dtype(dtype)
        setting = replace(other.setting, layout=Layout.SHUFFLED, unused=Unused.NAN)
        for spec in _specs(other):
            chosen = replace(spec, top_k=2) if Feature.SPARSE in trial.features else spec
            step = other.state_step(other.bench(chosen, chosen, setting=setting), kept, layer=1)
            step.pad(1, 3, torch.nan)
            other.try_step(step)
            other.try_step(step.next_step(2, seed=1))
            fresh = [Row(0, row.query_len) for row in kept]
            other.try_step(other.state_step(other.bench(chosen, setting=setting), fresh, transient=True))
