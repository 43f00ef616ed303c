"""The kit catches wrong backends that nobody thought of when its cases were made, and names what matters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from conformance.fault_hunt import CPU, ground_of, hunt_all
from conformance.random_faults import Condition, Effect, Fault, faulty_backend, seen_point, subject_of
from sightline.attention.capability import Capability
from sightline.attention.contract import AttentionPlan, BackendContext, StepView
from sightline.attention.dimensions import Dimension, Point
from sightline.attention.kinds import SpecKind
from sightline.testing.conformance.case_run import try_case
from sightline.testing.conformance.checks import CHECKS
from sightline.testing.conformance.kit import Verdict, try_check
from sightline.testing.conformance.trial import Effort, Trial

[COVERING] = [check for check in CHECKS if check.name == "covering"]
LAYERS, ROWS, WINDOW = Dimension.LAYERS, Dimension.ROWS, Dimension.WINDOW

FIVE = {
    "a neighbour layer from the fifth on": (
        Fault((Condition(LAYERS, 5),), Effect.NEIGHBOUR_LAYER),
        "from 5 layers of a group on (4 passes)",
    ),
    "heads beyond the eighth key head": (
        Fault((Condition(Dimension.KEY_HEADS, 9),), Effect.FIRST_HEAD),
        "from 9 key heads on (8 passes)",
    ),
    "windows above 512": (Fault((Condition(WINDOW, 513),), Effect.WINDOW_CUT), "from 513 window on (512 passes)"),
    "the 320th new token": (
        Fault((Condition(Dimension.NEW_TOKENS, 320),), Effect.MISSES_ITSELF),
        "from 320 new tokens of a row on (319 passes)",
    ),
    "one row alone": (
        Fault((Condition(ROWS, 1, at_least=False),), Effect.FIRST_LAYER),
        "up to 1 rows (2 passes)",
    ),
}
"""Backends that an earlier kit proved, and what the failure must say of each."""


@pytest.mark.parametrize(("fault", "told"), FIVE.values(), ids=FIVE.keys())
def test_a_backend_that_was_proven_once_is_caught_and_what_matters_is_named(fault: Fault, told: str) -> None:
    samples = ground_of(SpecKind.SOFTMAX, Effort.FULL).samples
    result = try_check(COVERING, subject_of(fault, CPU), Effort.FULL, samples)
    assert result.verdict is Verdict.FAILED
    assert told in result.detail


@pytest.mark.parametrize(("kind", "count"), [(SpecKind.SOFTMAX, 30), (SpecKind.LATENT, 12)], ids=["softmax", "latent"])
def test_faults_drawn_at_random_are_caught(kind: SpecKind, count: int) -> None:
    hunted = hunt_all(7, count, kind, Effort.FULL)
    assert sum(each.caught_by is not None for each in hunted) >= count - 1
    assert [str(each.fault) for each in hunted if each.caught_by is None and each.is_covered] == []


@pytest.mark.slow
@pytest.mark.parametrize("effort", Effort, ids=lambda effort: effort.value)
@pytest.mark.parametrize("kind", [SpecKind.SOFTMAX, SpecKind.LATENT], ids=lambda kind: kind.value)
def test_most_of_many_faults_are_caught(kind: SpecKind, effort: Effort) -> None:
    least = {Effort.FULL: 0.95, Effort.QUICK: 0.75}[effort]
    for seed in (11, 12, 13):
        hunted = hunt_all(seed, 200, kind, effort)
        assert sum(each.caught_by is not None for each in hunted) >= least * 200


@pytest.mark.parametrize("number", range(2))
def test_a_hunt_says_what_the_whole_check_says(number: int) -> None:
    """Only the cases that meet a fault are run in a hunt; here all of them are."""
    fault = (
        Fault((Condition(Dimension.PAGE_SIZE, 3), Condition(ROWS, 100)), Effect.ZERO),
        Fault((Condition(Dimension.CONTEXT, 1 << 20),), Effect.ZERO),
    )[number]
    samples = ground_of(SpecKind.SOFTMAX, Effort.QUICK).samples
    result = try_check(COVERING, subject_of(fault, CPU), Effort.QUICK, samples)
    points = [case.point() for case in ground_of(SpecKind.SOFTMAX, Effort.QUICK).cases]
    assert (result.verdict is Verdict.FAILED) == any(map(fault.holds, points))
    if result.verdict is Verdict.PASSED:
        assert list(result.points) == points


def recording(kind: SpecKind, seen: list[Point]) -> type[Any]:
    """The correct backend, which tells what it sees of each step."""
    base = faulty_backend(Fault((Condition(ROWS, 1 << 40),), Effect.ZERO), kind)

    class Recording(base):  # type: ignore[misc, valid-type]
        capabilities: ClassVar[tuple[Capability, ...]] = base.capabilities

        def __init__(self, context: BackendContext[Any]) -> None:
            super().__init__(context)
            self._given = context

        def plan(self, step: StepView, buffers: Any) -> AttentionPlan[Any]:
            seen.append(seen_point(step, self._given, self._pool, self._past))
            planned: AttentionPlan[Any] = super().plan(step, buffers)
            return planned

    return Recording


@pytest.mark.parametrize("kind", [SpecKind.SOFTMAX, SpecKind.LATENT], ids=lambda kind: kind.value)
def test_what_is_recorded_is_what_a_backend_saw(kind: SpecKind) -> None:
    ground = ground_of(kind, Effort.FULL)
    subject = subject_of(Fault((Condition(ROWS, 1 << 40),), Effect.ZERO), CPU, kind)
    for case in sorted(ground.cases, key=lambda case: case.seconds)[:120:3]:
        seen: list[Point] = []
        watched = replace(subject, backend=recording(kind, seen))
        try_case(Trial(watched, Effort.FULL, ground.samples), case)
        assert any(dict(point) == dict(case.point()) for point in seen), case.values
