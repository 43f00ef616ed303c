"""The `covering` check: brings every two ends of scales, and every two values that a row declares, together in a case.

Kernels are often wrong from some length on, for one dtype at one head dimension, or for one feature at one page size.
The cases come from `generator`, and the ones that pass are recorded in the proof. A case that fails is shrunk first, so
that the report names what matters.
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
from sightline.testing.conformance.trial import CheckFailed, Effort, Trial, check, fail

_SECONDS = {Effort.QUICK: 3.5, Effort.FULL: None}
"""The estimated time of the chosen cases; None for all cases."""
_FOCUSED = (
    "features-together grouped-heads heads ways-in-turn head-dims page-sizes cache-dtypes cache-scales "
    "cache-saturation each-key-once accumulation large-scores many-rows limits prefix-tail read-back transient-in-turn "
    "page-sharing layers lanes plan-buffers zeroed-leases filled-buffers empty-rows "
    "states-together other-slots run-again shared-rates "
    "compressed-together "
    "nothing-to-choose ties nan-scores key-scales unchosen-entries chosen-pages choices-in-turn"
)
"""The checks of single things, which `covering` builds on."""


@check(_FOCUSED, num_shares=8)
def covering(trial: Trial) -> None:
    """Every two declared values work together, and each with both ends of every length, size and count."""
    cover(trial, trial.share.of(covering_cases(trial)), domains_of(trial.subject, trial.samples))


def cover(
    trial: Trial, cases: Sequence[Case], domains: Domains, is_excused: Callable[[Exception], bool] = lambda _: False
) -> None:
    """Tries cases of the domains, and records a point for each that passes. Skips cases whose error is excused."""
    for case in cases:
        try:
            try_case(trial, case)
        except CheckFailed as failure:
            _fail_smaller(trial, case, domains, str(failure))
        except Exception as error:
            if is_excused(error):
                continue
            # After an illegal memory access the GPU cannot run anything more in this process.
            if trial.subject.device.kind is DeviceKind.CUDA:
                raise
            _fail_smaller(trial, case, domains, f"{type(error).__name__}: {error}")
        trial.progress.points.append(case.point())


def covering_cases(trial: Trial) -> tuple[Case, ...]:
    """Returns the cases of a trial, in order."""
    return cases_for(domains_of(trial.subject, trial.samples), _SECONDS[trial.effort])


def _fail_smaller(trial: Trial, case: Case, domains: Domains, failure: str) -> NoReturn:
    """Shrinks a failing case, then fails with the smallest one and the dimensions that matter."""
    reasons = [failure]
    num_steps, tried = trial.progress.num_steps, trial.progress.case

    def fails(smaller: Case) -> bool:
        try:
            try_case(trial, smaller)
        except Exception as error:  # whatever a backend raises
            reasons.append(str(error))
            trial.progress.case = f"{trial.progress.case}; {told(smaller)}"
            return True
        return False

    shrunk = shrink(case, domains, fails)
    trial.progress.num_steps, trial.progress.case = num_steps, f"{tried}; smallest: {told(shrunk.case)}"
    fail(f"{shrunk}\n{reasons[-1]}")


def told(case: Case) -> str:
    """Describes a case in one line."""
    return ", ".join(f"{dimension.value} {value}" for dimension, value in case.values.items())
