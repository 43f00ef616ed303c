"""States: a step reads the state behind each row's context, and keeps those behind chosen tokens in other slots.

Every check compares outputs and kept states with the oracle. These are about slots: which are read, which are written,
and that no other is touched. `recurrences` is about what is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from sightline.attention.kinds import KEEPING_KINDS, Feature, SpecKind
from sightline.cache.layout import Layout
from sightline.core.batch import PADDING_SLOT
from sightline.core.device import DeviceKind, available_bytes
from sightline.testing.conformance.checks.cache import snapshot
from sightline.testing.conformance.given_inputs import tensor_at
from sightline.testing.conformance.layer_step import bits
from sightline.testing.conformance.rig import AttentionRig, Row, Subject, Unused
from sightline.testing.conformance.state_steps import StateStep
from sightline.testing.conformance.trial import Trial, check, fail, needs_feature

_DECODED = (Row(5, 1), Row(0, 1), Row(9, 1), Row(2, 1), Row(0, 1))
_LENGTHS = (2, 5, 17, 64, 65, 130, 3, 63)
_MIXED = (Row(7, 1), Row(0, 1), Row(3, 9, checkpoints=(2, 5)), Row(0, 6, candidates=3), Row(30, 2, candidates=2))
_OTHERS = (Row(2, 4), Row(0, 3, checkpoints=(0,)), Row(9, 1))
_LARGE = 1 << 31
"""Elements that signed 32-bit offsets cannot reach."""
_STATE_BYTES = 4


@check("built", kinds=KEEPING_KINDS)
def state_write(trial: Trial) -> None:
    """The first token of a row begins with the empty state, and the state behind it is kept."""
    trial.try_rows([Row(0, 1)])
    trial.try_rows([Row(0, 1), Row(0, 1)])


@check("state-write", kinds=KEEPING_KINDS)
def state_read(trial: Trial) -> None:
    """A token continues the state behind its context."""
    for context_len in trial.some((3, 1, 40)):
        trial.try_rows([Row(context_len, 1)])


@check("state-read", kinds=KEEPING_KINDS)
def state_rows(trial: Trial) -> None:
    """Each row reads and writes its own slots, in whatever order they are."""
    for layout in (Layout.IN_ORDER, Layout.SHUFFLED, Layout.DESCENDING):
        for rows in (_DECODED, _DECODED[::-1]):
            trial.try_rows(rows, setting=replace(trial.setting, layout=layout))


@check("state-read", kinds=KEEPING_KINDS)
def prompts(trial: Trial) -> None:
    """Rows of several tokens are right, with a context and without one."""
    for query_len in trial.some(_LENGTHS, 5):
        for context_len in (0, 7):
            trial.try_rows([Row(context_len, query_len)])


@check("ragged", kinds=KEEPING_KINDS)
def kept_places(trial: Trial) -> None:
    """The state behind any token of a row can be kept."""
    for query_len in trial.some((9, 70, 130), 2):
        places = range(query_len - 1)
        near = [place for border in (0, 16, 32, 64, 128) for place in (border - 2, border - 1, border)]
        chosen = places if query_len < 10 else [place for place in near if place in places]
        for context_len in (0, 7):
            # One place, then several neighbours, then the same place in every row.
            for kept in [(place,) for place in trial.some(chosen, 5)] + [tuple(chosen)[-7:]]:
                trial.try_rows([Row(context_len, query_len, checkpoints=kept)])
    rows = [Row(3, 9, checkpoints=(4,)), Row(0, 1), Row(0, 20, checkpoints=(4, 15)), Row(8, 5, checkpoints=(0,))]
    trial.try_rows(rows)
    trial.try_rows(rows[::-1], setting=replace(trial.setting, layout=Layout.SHUFFLED))


@check("kept-places", "padding", kinds=KEEPING_KINDS)
def guesses(trial: Trial) -> None:
    """The states behind all guesses of a row are kept, so that any of them can be the last one accepted."""
    for count in trial.some((4, 2, 8)):
        trial.try_rows([Row(9, count, candidates=count)])
        rows = [Row(9, 1), Row(5, count, candidates=count), Row(0, 1), Row(30, 9, candidates=count)]
        trial.try_rows(rows)
        step = trial.step(trial.bench(setting=replace(trial.setting, layout=Layout.SHUFFLED)), rows[::-1])
        step.pad(2, 3, torch.nan)
        trial.try_step(step)


def _unchanged(trial: Trial, bench: AttentionRig, steps: Sequence[StateStep]) -> None:
    """Runs steps of different layers, and fails if a slot that they do not write has changed."""
    before = snapshot(bench)
    for step in steps:
        trial.run(step)
    for name, after in snapshot(bench).items():
        allowed = {(step.layer_in_group, slot) for step in steps for slot in step.written_in(name)}
        same = (bits(after) == bits(before[name])).view(*after.shape[:2], -1).all(-1)
        changed = [(int(layer), int(slot)) for layer, slot in (~same).nonzero()]
        wrong = [place for place in changed if place not in allowed]
        if wrong:
            layer, slot = wrong[0]
            what = "slot 0, the empty state," if slot == PADDING_SLOT else f"slot {slot}"
            fail(f"expected a step to change no slot but those that it writes, got a change of {what} in {name}, "
                 f"layer {layer}")  # fmt: skip


@check("guesses", "layers", kinds=KEEPING_KINDS)
def other_slots(trial: Trial) -> None:
    """A step changes only the slots that it writes, in its layer: not the states that it reads, and never slot 0."""
    for unused in (Unused.GARBAGE, Unused.NAN):
        for padding in ((0, 0), (2, 5)):
            bench = trial.bench(trial.plain, trial.plain, setting=replace(trial.setting, unused=unused))
            step = trial.state_step(bench, _MIXED, layer=1)
            step.pad(*padding, 7.0)
            _unchanged(trial, bench, [step])


@check("guesses", kinds=KEEPING_KINDS)
def poisoned_slots(trial: Trial) -> None:
    """NaN in slots that a step does not name, or in another row, does not reach it."""
    for layout in (Layout.IN_ORDER, Layout.SHUFFLED):
        setting = replace(trial.setting, unused=Unused.NAN, layout=layout)
        trial.try_rows(_MIXED, setting=setting)
        trial.try_rows(_DECODED, setting=setting)
    for rows in ((Row(20, 1), Row(25, 1), Row(30, 1)), (Row(5, 9), Row(21, 6), Row(0, 4))):
        step = trial.step(trial.bench(), rows)
        expected = step.expected()
        first, last = rows[0].query_len, rows[0].query_len + rows[1].query_len
        step.change_inputs(torch.clone)
        for name in trial.problem.per_token:
            tensor = tensor_at(step.inputs, name)
            if tensor is not None:
                tensor[first:last] = torch.nan
        answer = trial.run(step)
        trial.progress.num_steps += 1
        for name, tokens in (("before", slice(0, first)), ("behind", slice(last, None))):
            trial.compare(answer.out[tokens], expected.out[tokens], f"the output of the row {name} one with NaN")


@check("next-batch", "other-slots", kinds=KEEPING_KINDS)
def run_again(trial: Trial) -> None:
    """A plan that runs again gives the same outputs and states: a step that failed halfway can be repeated."""
    for rows in (_MIXED, _DECODED):
        step = trial.step(trial.bench(), rows)
        planned = step.plan()
        for repeat in range(3):
            planned.prepare()
            trial.hold(step, step.attend(planned), f"run {repeat} of one plan")


@check("plan-buffers", excused=needs_feature(Feature.SEVERAL_PLANS), kinds=KEEPING_KINDS)
def plans_alive(trial: Trial) -> None:
    """A step that was planned while another one was about to run is right, and so is the other."""
    for rows, others in trial.some(((_MIXED, _OTHERS), (_DECODED, _DECODED[1:])), 1):
        bench = trial.bench()
        first, second = trial.step(bench, rows), trial.step(bench, others, seed=1)
        planned = first.plan()
        aside = bench.planner.plan_aside(second.batch)
        for step, each in ((first, planned), (second, aside)):
            each.prepare()
            trial.hold(step, step.attend(each), "planned beside another step")


def _too_large(subject: Subject) -> str | None:
    """A CPU touches only the used slots; a GPU must have room for all of them."""
    needed = _STATE_BYTES * _LARGE + (1 << 30)
    if subject.device.kind is DeviceKind.CUDA and available_bytes(subject.device) < needed:
        return f"expected {needed >> 30} GiB free for many states, got {available_bytes(subject.device) >> 30}"
    return None


@check("states-together", excused=_too_large, alone=True, kinds=frozenset({SpecKind.RECURRENT}))
def large_states(trial: Trial) -> None:
    """The last of states with more than 2^31 numbers is written and read."""
    spec = trial.sized(max(trial.samples.of_head_dims(trial.row)))
    largest = max(math.prod(plane.shape) for plane in trial.problem.planes(spec))
    setting = replace(trial.setting, layout=Layout.DESCENDING, max_rows=4, max_checkpoints=_LARGE // largest + 64)
    trial.try_rows([Row(9, 1), Row(0, 17, checkpoints=(3,)), Row(4, 2, candidates=2)], spec, setting)
