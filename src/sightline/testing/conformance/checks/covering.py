"""Covering: every two ends of scales and every two values together, over everything that a row declares.

A kernel is often wrong from some length on, for one dtype at one head dimension, or for one feature at one page size.
The cases come from `generator`, and those that pass are what a proof covers. One that fails is made smaller first, so
that the failure names what matters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from sightline.core.device import DeviceKind
from sightline.testing.conformance.case_run import try_case
from sightline.testing.conformance.cases import Case
from sightline.testing.conformance.domains import Domains, domains_of
from sightline.testing.conformance.generator import cases_for
from sightline.testing.conformance.shrink import shrink
from sightline.testing.conformance.trial import Check, CheckFailed, Effort, Trial, fail

_SECONDS = {Effort.QUICK: 3.5, Effort.FULL: None}
"""Of all cases together, as they are estimated; None is all of them."""


def covering(trial: Trial) -> None:
    cover(trial, trial.share.of(covering_cases(trial)), domains_of(trial.subject, trial.samples))


def cover(
    trial: Trial, cases: Sequence[Case], domains: Domains, is_excused: Callable[[Exception], bool] = lambda _: False
) -> None:
    """Tries cases of the domains. One that raises what is excused is passed over, and is no point."""
    for case in cases:
        try:
            try_case(trial, case)
        except CheckFailed as failure:
            _fail_smaller(trial, case, domains, str(failure))
        except Exception as error:
            if is_excused(error):
                continue
            # After an illegal access nothing on a GPU can be tried again.
            if trial.subject.device.kind is DeviceKind.CUDA:
                raise
            _fail_smaller(trial, case, domains, f"{type(error).__name__}: {error}")
        trial.progress.points.append(case.point())


def covering_cases(trial: Trial) -> tuple[Case, ...]:
    """The cases of a trial, in order."""
    return cases_for(domains_of(trial.subject, trial.samples), _SECONDS[trial.effort])


def _fail_smaller(trial: Trial, case: Case, domains: Domains, failure: str) -> NoReturn:
    """Fails with the smallest case that does, and what matters of it."""
    reasons = [failure]
    num_steps, tried = trial.progress.num_steps, trial.progress.case

    def fails(smaller: Case) -> bool:
        try:
            try_case(trial, smaller)
        except Exception as error:  # whatever the backend raises
            reasons.append(str(error))
            trial.progress.case = f"{trial.progress.case}; {told(smaller)}"
            return True
        return False

    shrunk = shrink(case, domains, fails)
    trial.progress.num_steps, trial.progress.case = num_steps, f"{tried}; smallest: {told(shrunk.case)}"
    fail(f"{shrunk}\n{reasons[-1]}")


def told(case: Case) -> str:
    """A case as a person would write it down."""
    return ", ".join(f"{dimension.value} {value}" for dimension, value in case.values.items())


CHECKS = (
    Check(
        "covering",
        "every two declared values together, and each at both ends of rows, lengths, layers, heads, windows and pools",
        covering,
        (
            "features-together",
            "grouped-heads",
            "heads",
            "ways-in-turn",
            "head-dims",
            "page-sizes",
            "cache-dtypes",
            "cache-scales",
            "cache-saturation",
            "each-key-once",
            "accumulation",
            "large-scores",
            "many-rows",
            "limits",
            "prefix-tail",
            "read-back",
            "transient-in-turn",
            "page-sharing",
            "layers",
            "lanes",
            "plan-buffers",
            "zeroed-leases",
            "filled-buffers",
            "empty-rows",
        ),
        num_shares=8,
    ),
)
