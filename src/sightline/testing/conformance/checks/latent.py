"""Latent attention: each head makes its own keys and values, and a row may be computed in several ways.

A backend chooses the way by lengths. These checks try lengths on both sides of likely choices: few queries on many keys
and many on few, prefixes that end at a chunk's border and beside it, rows of different ways in one step, and other
lengths in the next step.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.spec import LatentSpec
from sightline.cache.layout import Layout
from sightline.core.batch import FULL
from sightline.testing.conformance.checks.features import LSE
from sightline.testing.conformance.rig import RigSetting, Row
from sightline.testing.conformance.steps import Step
from sightline.testing.conformance.trial import Trial, check

_LATENT = frozenset({SpecKind.LATENT})
_FIRST = ((300, 40), (320, 9), (319, 9), (321, 9), (0, 300), (600, 2))
"""(context, new tokens): many of both, a chunk's border and both sides of it, no context, few new tokens."""
_CONTEXTS = (0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 700)
_NEW = (1, 2, 6, 24, 200)
_ROOM_BYTES = 136 << 20
"""Size of keys and values that hardly any backend makes at once."""
_TOGETHER = (Row(600, 20), Row(0, 270), Row(70, 9), Row(300, 1), Row(500, 12), Row(1, 30), Row(330, 33), Row(0, 40))
"""Rows of all ways. A long fresh prompt has no prefix, and its first tokens see hardly any keys."""
_IN_TURN = (
    (Row(600, 20), Row(70, 20), Row(320, 20)),
    (Row(70, 20), Row(600, 20), Row(256, 20)),
    (Row(0, 20), Row(450, 20), Row(513, 20)),
    (Row(640, 1), Row(1, 39), Row(384, 20)),
)
"""Steps of three rows and sixty new tokens each."""


@check("ragged", kinds=frozenset({SpecKind.LATENT, SpecKind.INDEX}))
def heads(trial: Trial) -> None:
    """Every declared number of heads works, all of which read the one entry of a token."""
    counts = trial.samples.of_group_sizes(trial.row)
    # Models have many heads, and kernels take them in blocks.
    for count in dict.fromkeys((*trial.some(counts, 3), max(counts))):
        spec = trial.spec(trial.plain.head_dim, count, 1)
        trial.try_rows([Row(20, 1), Row(3, 1), Row(0, 4), Row(7, 13)], spec)


def _roomy(trial: Trial) -> RigSetting:
    return replace(trial.setting, max_seq_len=1024, max_rows=8)


@check("long-beside-short", "non-causal", "transient", "lse", kinds=_LATENT)
def ways(trial: Trial) -> None:
    """Rows of any length are right, whichever way they are computed, also at the borders of chunks."""
    cases = dict.fromkeys((*_FIRST, *itertools.product(_CONTEXTS, _NEW)))
    for context_len, query_len in trial.some(tuple(cases), len(_FIRST)):
        trial.try_rows([Row(context_len, query_len)], setting=_roomy(trial), needs=LSE & trial.features)
    if Feature.NON_CAUSAL in trial.features:
        trial.try_rows([Row(300, 40, FULL)], setting=_roomy(trial))
    trial.try_step(Step(trial.bench(setting=_roomy(trial)), [Row(0, 400)], transient=True))
    head_dim = min(trial.samples.of_head_dims(trial.row), key=lambda size: abs(size - 128))
    for count in trial.some((max(trial.samples.of_group_sizes(trial.row)),), 0):
        spec = trial.spec(head_dim, count, 1)
        row = _too_long_for_one_piece(spec, trial.dtype)
        trial.try_rows([row], spec, replace(trial.setting, max_seq_len=row.seq_len, max_rows=1))


def _too_long_for_one_piece(spec: LatentSpec, dtype: torch.dtype) -> Row:
    """A row whose many new tokens make it cheaper to compute keys than to read entries, with more keys than fit."""
    made = spec.nope_dim + spec.value_dim
    query_len = 2 + spec.latent_dim * made // max(1, 2 * spec.latent_dim - made)
    return Row(_ROOM_BYTES // (spec.num_q_heads * (made + spec.rope_dim) * dtype.itemsize), query_len)


@check("ways", "page-order", kinds=_LATENT)
def ways_together(trial: Trial) -> None:
    """Rows of all ways may be in one step: prefixes that end in one chunk beside longer ones."""
    for layout in (Layout.IN_ORDER, Layout.SHUFFLED):
        setting = replace(_roomy(trial), layout=layout)
        for rows in (_TOGETHER, _TOGETHER[::-1]):
            trial.try_rows(rows, setting=setting, needs=LSE & trial.features)
    if Feature.NON_CAUSAL in trial.features:
        trial.try_rows([replace(row, mask=FULL) for row in _TOGETHER[:4]] + [*_TOGETHER[4:]], setting=_roomy(trial))


@check("ways-together", "next-batch", kinds=_LATENT)
def ways_in_turn(trial: Trial) -> None:
    """The next step may have other prefixes with as many rows and tokens."""
    bench = trial.bench(setting=_roomy(trial))
    for seed, rows in enumerate(_IN_TURN):
        step = Step(bench, rows, seed=seed)
        trial.try_step(step)
        trial.try_step(step.next_step(20, seed=10 + seed))
        for table_row in step.table_rows:
            bench.store.close_row(table_row)
        trial.try_step(Step(bench, [Row(0, 300 + seed), Row(0, 20)], seed=20 + seed, transient=True))
