"""Recurrences: decays, the delta rule, convolutions and the other things that a layer with states computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sightline.attention.kinds import RECURRENT_ONLY, STATE_KINDS, Feature, SpecKind
from sightline.attention.oracle.dtypes import compute_dtypes
from sightline.cache.layout import Layout
from sightline.testing.conformance.rig import Row, Unused
from sightline.testing.conformance.state_steps import StateStep
from sightline.testing.conformance.trial import Trial, check, needs_feature

_RECURRENT = frozenset({SpecKind.RECURRENT})
_ROWS = (Row(9, 1), Row(0, 1), Row(3, 7), Row(0, 11), Row(20, 5), Row(0, 70))
_LONGER = (Row(3, 7), Row(0, 11), Row(20, 5), Row(0, 70))
"""Rows of more tokens than a convolution sees."""
_KEPT = (Row(9, 1), Row(0, 1), Row(3, 7), Row(0, 11, checkpoints=(2, 6)), Row(20, 5, candidates=5), Row(0, 70))
_WIDTHS = (4, 3, 2)
"""The usual widths of convolutions."""
_PIECES = (3, 1, 1, 2, 5, 1, 4, 66, 1)
"""Tokens of steps that follow each other: some have fewer than a convolution sees."""


def _with(trial: Trial, features: Iterable[Feature] = (), conv_width: int = 0, *, unit_keys: bool = False) -> Any:
    """Returns the plain spec with these features, and with those that the row serves nothing without."""
    named = [feature.value for feature in {*features, *trial.row.only_with}]
    return trial.problem.with_features(trial.plain, named, conv_width, unit_keys=unit_keys)


def _prompt(trial: Trial, spec: Any, rows: Iterable[Row]) -> StateStep:
    return StateStep(trial.bench(spec), tuple(rows))


def _of_features(trial: Trial, *features: Feature) -> None:
    for unit_keys in (False, True):
        trial.try_rows(_ROWS, _with(trial, features, unit_keys=unit_keys))


@check("ragged", kinds=_RECURRENT)
def decays(trial: Trial) -> None:
    """States that decay fast, not at all, or at once after a long time are right, also in long rows."""
    for rate in trial.some((-20.0, 0.0, -1.0, -80.0), 3):
        step = _prompt(trial, trial.plain, (Row(5, 130), Row(7, 1), Row(0, 9)))
        step.inputs.decay.fill_(rate)
        trial.try_step(step)
    step = _prompt(trial, trial.plain, (Row(5, 130), Row(0, 70)))
    # Fast here and slow there: products of decays must not be ratios of tiny numbers.
    step.inputs.decay[::3] = 0.0
    step.inputs.decay[1::7] = -20.0
    step.inputs.decay[40:60] = -15.0
    trial.try_step(step)


@check("ragged", kinds=STATE_KINDS)
def convolutions(trial: Trial) -> None:
    """Convolutions of every usual width are right, with a bias and without one."""
    for width in trial.some(_WIDTHS, 3):
        step = _prompt(trial, _with(trial, conv_width=width), _LONGER)
        trial.try_step(step)
        step = _prompt(trial, _with(trial, conv_width=width), _LONGER)
        step.inputs = replace(step.inputs, conv=step.inputs.conv._replace(bias=None))
        trial.try_step(step)


@check("convolutions guesses padding next-batch", kinds=STATE_KINDS)
def chunk_borders(trial: Trial) -> None:
    """A prompt may be cut anywhere: each piece continues where the one before it stopped, however short it is."""
    for width in trial.some(_WIDTHS, 1):
        for first in (0, 5):
            step = _prompt(trial, _with(trial, conv_width=width), (Row(first, 2), Row(first, 2), Row(0, 1)))
            step.pad(1, 4, torch.nan)
            trial.try_step(step)
            for seed, count in enumerate(trial.some(_PIECES, 6)):
                ends = [
                    (row.seq_len, 1 + (count + place) % 5 if place else count) for place, row in enumerate(step.rows)
                ]
                step = step.following([Row(context, new) for context, new in ends], seed=seed)
                step.pad(1, 4, torch.nan)
                trial.try_step(step)
    for place in trial.some((0, 1, 2, 3), 2):
        rows = (Row(6, 5, checkpoints=(place,)), Row(0, 5, checkpoints=(place,)), Row(1, 3, candidates=3))
        trial.try_rows(rows, _with(trial, conv_width=_WIDTHS[0]))


@check("ragged", kinds=_RECURRENT)
def unit_keys(trial: Trial) -> None:
    """Queries and keys are divided by their lengths, and those of length 0 stay 0."""
    spec = _with(trial, unit_keys=True)
    trial.try_rows(_ROWS, spec)
    step = _prompt(trial, spec, _ROWS)
    keys = spec.num_key_heads * spec.key_dim
    # A key, a query, or both of a token are 0; others are as short as the epsilon, or long.
    step.inputs.mixed[1::4, keys : 2 * keys] = 0.0
    step.inputs.mixed[2::4, :keys] = 0.0
    step.inputs.mixed[3::8, : 2 * keys] = 0.0
    step.inputs.mixed[4::8, : 2 * keys] *= 1e-3
    step.inputs.mixed[0::8, : 2 * keys] *= 30.0
    trial.try_step(step)


@check("ragged", kinds=_RECURRENT)
def key_heads(trial: Trial) -> None:
    """Head h has the query and the key of key head h // group size, for every declared group size."""
    for size in trial.some(trial.samples.of_group_sizes(trial.row), 3):
        for count in (1, 3, 8):
            trial.try_rows(_ROWS[:4], trial.spec(trial.plain.key_dim, size, count))


@check("unit-keys", kinds=_RECURRENT, excused=needs_feature(Feature.DELTA_RULE))
def delta_rule(trial: Trial) -> None:
    """What is stored is the difference between a value and what its key recalls from the decayed state."""
    _of_features(trial, Feature.DELTA_RULE)


@check("unit-keys", "decays", kinds=_RECURRENT, excused=needs_feature(Feature.CHANNEL_DECAY))
def channel_decay(trial: Trial) -> None:
    """Every key dimension decays at its own rate, fast ones beside slow ones."""
    _of_features(trial, Feature.CHANNEL_DECAY)
    step = _prompt(trial, _with(trial, [Feature.CHANNEL_DECAY]), (Row(5, 130), Row(7, 1), Row(0, 9)))
    step.inputs.decay[..., ::2] = -20.0
    step.inputs.decay[..., 1::4] = 0.0
    trial.try_step(step)


@check("unit-keys", kinds=_RECURRENT, excused=needs_feature(Feature.SKIP))
def skip(trial: Trial) -> None:
    """A multiple of each head's value is added to its output, and does not change the state."""
    _of_features(trial, Feature.SKIP)


@check("channel-decay", kinds=_RECURRENT)
def shared_rates(trial: Trial) -> None:
    """Decays and betas that all tokens share may be one row of numbers, with stride 0."""
    for features in ((), [Feature.CHANNEL_DECAY] if Feature.CHANNEL_DECAY in trial.features else ()):
        step = _prompt(trial, _with(trial, features), _ROWS)
        for name in ("decay", "beta"):
            numbers = vars(step.inputs)[name]
            numbers.copy_(numbers[:1].clone().expand_as(numbers))
        planned = step.plan()
        planned.prepare()
        device = step.bench.device

        def shared(tensor: Tensor, device: torch.device = device) -> Tensor:
            return tensor[:1].to(device).expand(tensor.shape)

        given = replace(
            step.inputs,
            mixed=step.inputs.mixed.to(device),
            decay=shared(step.inputs.decay),
            beta=shared(step.inputs.beta),
        )
        out = step.empty_out()
        planned.attend(step.layer, given, out)
        expected = step.expected()
        trial.compare(out.cpu(), expected.out, "the output for rates that all tokens share", step)
        trial.require_written(step, expected)
        trial.progress.num_steps += 1


@check(
    "chunk-borders guesses poisoned-slots unit-keys key-heads decays dtypes delta-rule channel-decay skip scale",
    kinds=STATE_KINDS,
)
def states_together(trial: Trial) -> None:
    """All declared features work together and without each of them, in every dtype, in shuffled slots beside NaN."""
    declared = sorted(trial.features & RECURRENT_ONLY, key=lambda each: each.value)
    without = [frozenset(declared) - {each} for each in declared]
    for dtype in compute_dtypes(trial.row):
        other = trial.in_dtype(dtype)
        setting = replace(other.setting, layout=Layout.SHUFFLED, unused=Unused.NAN)
        for features in trial.some([frozenset(declared), *without], 2):
            spec = _with(trial, features, _WIDTHS[0], unit_keys=Feature.DELTA_RULE in features | trial.row.only_with)
            step = StateStep(other.bench(spec, setting=setting), _KEPT)
            step.pad(1, 3, torch.nan)
            other.try_step(step)
            other.try_step(step.next_step(2, seed=1))
            fresh = [Row(0, row.query_len) for row in _KEPT]
            other.try_step(StateStep(other.bench(spec, setting=setting), fresh, transient=True))
