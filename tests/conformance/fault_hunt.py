"""How many faults drawn at random the kit catches. The numbers of docs/conformance.md come from

    PYTHONPATH=tests .venv/bin/python -m conformance.fault_hunt --seeds 101,202,303 --faults 200

A fault does nothing where its conditions do not hold, and a correct backend passes every case. So only the cases in
which they hold are run, on the faulty backend itself, and then the other checks, until one fails.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from conformance.random_faults import Condition, Effect, Fault, draw_fault, subject_of
from sightline.attention.coverage import Coverage
from sightline.attention.dimensions import Dimension
from sightline.attention.kinds import SpecKind
from sightline.core.device import detect_device
from sightline.testing.conformance.case_run import try_case
from sightline.testing.conformance.cases import Case
from sightline.testing.conformance.checks import CHECKS
from sightline.testing.conformance.checks.covering import covering_cases
from sightline.testing.conformance.domains import Domains, domains_of
from sightline.testing.conformance.kit import Verdict, try_check
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.trial import Effort, Trial

CPU = detect_device("cpu")
_ABSENT = Fault((Condition(Dimension.ROWS, 1 << 40),), Effect.ZERO)
"""Its condition never holds: the correct backend."""
_SLOW = ("covering", "large-pool", "no-growth", "stable-addresses")
"""Checks that are not tried a second time, or that are about memory."""


@dataclass(frozen=True)
class Ground:
    """What faults of one kind of attention are drawn from and tried on."""

    kind: SpecKind
    samples: Samples
    domains: Domains
    cases: tuple[Case, ...]
    coverage: Coverage
    """Of a kit that all cases passed."""


@lru_cache
def ground_of(kind: SpecKind, effort: Effort) -> Ground:
    subject = subject_of(_ABSENT, CPU, kind)
    samples = Samples().for_problem(subject.problem)
    cases = covering_cases(Trial(subject, effort, samples))
    coverage = Coverage.of(case.point() for case in cases)
    return Ground(kind, samples, domains_of(subject, samples), cases, coverage)


@dataclass(frozen=True)
class Hunted:
    """What came of one fault."""

    fault: Fault
    caught_by: str | None
    """The check that fails."""
    is_covered: bool
    """The coverage claims that there is no such fault."""


def hunt(fault: Fault, kind: SpecKind, effort: Effort) -> Hunted:
    """Looks for a case or a check that the faulty backend fails."""
    ground = ground_of(kind, effort)
    subject = subject_of(fault, CPU, kind)
    trial = Trial(subject, effort, ground.samples)
    is_covered = not ground.coverage.gaps(fault.demand())
    meeting = [case for case in ground.cases if fault.holds(case.point())]
    for case in sorted(meeting, key=lambda each: each.seconds):
        try:
            try_case(trial, case)
        except Exception:  # a wrong answer, or whatever comes of wrong numbers
            return Hunted(fault, "covering", is_covered)
    for check in CHECKS:
        if kind in check.kinds and check.name not in _SLOW:
            result = try_check(check, subject, effort, ground.samples)
            if result.verdict is Verdict.FAILED:
                return Hunted(fault, check.name, is_covered)
    return Hunted(fault, None, is_covered)


def hunt_all(seed: int, count: int, kind: SpecKind, effort: Effort) -> list[Hunted]:
    """Faults drawn from a seed."""
    draw, domains = random.Random(seed), ground_of(kind, Effort.FULL).domains
    return [hunt(draw_fault(domains, draw), kind, effort) for _ in range(count)]


def _lines(seeds: Sequence[int], count: int, kind: SpecKind, effort: Effort) -> list[str]:
    lines = []
    for seed in seeds:
        started = time.perf_counter()
        hunted = hunt_all(seed, count, kind, effort)
        escaped = [each for each in hunted if each.caught_by is None]
        within = [each for each in escaped if each.is_covered]
        lines.append(
            f"{kind.value} {effort.value} seed {seed}: {count - len(escaped)} of {count} caught, {len(within)} of the "
            f"escaped within the coverage ({time.perf_counter() - started:.0f} s)"
        )
        lines += [f"    {each.fault}{' (within the coverage)' if each.is_covered else ''}" for each in escaped]
        print("\n".join(lines[-len(escaped) - 1 :]), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="101,202,303")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--kinds", default=",".join(kind.value for kind in SpecKind))
    parser.add_argument("--efforts", default=",".join(effort.value for effort in Effort))
    asked = parser.parse_args()
    for kind in asked.kinds.split(","):
        for effort in asked.efforts.split(","):
            _lines([int(seed) for seed in asked.seeds.split(",")], asked.faults, SpecKind(kind), Effort(effort))


if __name__ == "__main__":
    main()
