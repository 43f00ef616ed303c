"""Caches of 8-bit floats: an entry is stored as value / scale, saturated, and read as stored * scale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sightline.attention.kinds import ENTRY_KINDS
from sightline.attention.oracle.dtypes import compute_dtypes, scaled_dtypes
from sightline.cache.layout import Layout, walk_slots
from sightline.testing.conformance.rig import PLAIN_SCALES, SCALES, AttentionRig, Row, Subject, as_bytes
from sightline.testing.conformance.steps import Step
from sightline.testing.conformance.trial import Trial, check, ragged_rows

_ANY_SCALES = (0.3, 0.07, 1.7, 0.011)
"""Not powers of two, so that a scale kept in fewer bits becomes another one."""
_SMALL_SCALES = (2.0**-8,)
"""With this scale a cache holds numbers up to 1.75; many entries are larger."""
_GROUND = (
    "cache-dtypes layers page-order split-merge long-beside-short accumulation next-batch prefix-tail read-back "
    "transient ways-together"
)
_ROUNDING = 0.05
"""How much an output may change with the scale: only the smallest entries are rounded differently."""


def _not_declared(subject: Subject) -> str | None:
    return None if scaled_dtypes(subject.capability) else "no cache with scales is declared"


def _trials(trial: Trial) -> Iterator[Trial]:
    for cache_dtype in scaled_dtypes(trial.row):
        for dtype in compute_dtypes(trial.row):
            yield trial.in_dtype(dtype, cache_dtype)


def _bench(trial: Trial, scales: tuple[float, ...], layout: Layout = Layout.IN_ORDER) -> AttentionRig:
    """Makes a rig with two layers, whose scales differ if there are several."""
    setting = replace(trial.setting, cache_scales=scales, layout=layout, max_rows=32, max_seq_len=1024)
    return trial.bench(trial.plain, trial.plain, setting=setting)


@check(_GROUND, excused=_not_declared, kinds=ENTRY_KINDS)
def cache_scales(trial: Trial) -> None:
    """Each layer's scales of keys and values are applied: they change the stored bytes, but not the output."""
    for other in _trials(trial):
        _stored_bytes_follow(other)
        for scales in (SCALES, _ANY_SCALES):
            bench = _bench(other, scales, Layout.SHUFFLED)
            for layer in (1, 0):
                step = Step(bench, ragged_rows(trial.page_size), layer=layer)
                step.snap()
                other.try_step(step)
        for rows in ([Row(0, 2 * trial.page_size + 3), Row(0, 1)], [Row(300, 40), Row(700, 1)]):
            prompt = Step(_bench(other, SCALES), rows, layer=1)
            other.try_step(prompt)
            other.try_step(prompt.next_step(1, seed=1))
        other.try_step(Step(_bench(other, SCALES), [Row(0, 5), Row(0, 1)], layer=1, transient=True))


def _stored_bytes_follow(trial: Trial) -> None:
    """Fails unless another scale changes the stored bytes, and the output only by rounding."""
    steps = [Step(_bench(trial, scales), [Row(0, trial.page_size + 1)]) for scales in (PLAIN_SCALES, SCALES)]
    plain, scaled = (trial.try_step(step) for step in steps)
    for plane in steps[0].planes:
        same = torch.equal(*(_row_bytes(step, plane.name) for step in steps))
        trial.require(
            not same,
            f"expected a scale of {steps[1].pool.scales(plane.name)[0]} to store other bytes of {plane.name} than 1, "
            "got the same",
        )
    trial.compare(scaled.out, plain.out, "an output with another scale", steps[1], _ROUNDING)


def _row_bytes(step: Step, name: str) -> Tensor:
    slots = walk_slots(step.pool, step.table_rows[0], step.rows[0].seq_len)
    return as_bytes(step.pool.plane(name)[step.layer_in_group])[slots].cpu()


@check("cache-scales", excused=_not_declared, kinds=ENTRY_KINDS)
def cache_saturation(trial: Trial) -> None:
    """Entries beyond the range of the cache dtype are stored as its largest value, not as NaN."""
    for other in _trials(trial):
        step = Step(_bench(other, _SMALL_SCALES), ragged_rows(trial.page_size))
        other.problem.new_values(step.inputs)[0] = 3e4
        other.try_step(step)
