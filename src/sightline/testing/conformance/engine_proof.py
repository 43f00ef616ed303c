"""Proves an engine: tries every backend that it would use on what the engine would ask of it.

    EngineConfig ─▶ Blueprint ─▶ duties: a capability row, a group of layers, the kinds of rows that it serves
                                   ├─▶ the checks, of the row narrowed to the engine's dtypes, sizes and features
                                   └─▶ for each kind of rows, cases over what the engine demands

Opens a model without its weights, and chooses backends as serving would. Prints nothing. Does not know how a case is
run.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sightline.attention.backends import registry
from sightline.attention.capability import ANY, Capability, Requirement, Work
from sightline.attention.coverage import Coverage, Demand, Gap
from sightline.attention.declared_rows import row_labels
from sightline.attention.dimensions import Dimension, Span
from sightline.attention.groups import LayerGroup
from sightline.attention.proof import Identity, Proof, ProofBook, utc_now
from sightline.attention.selection import Candidate, Selection
from sightline.core.config import PADDING_PAGES, EngineConfig
from sightline.core.device import Device, DeviceKind, available_bytes
from sightline.core.ledger import Ledger
from sightline.core.resolution import ResolvedConfig
from sightline.opening import describe_model
from sightline.runner.build import Blueprint
from sightline.runner.demand import requirement
from sightline.testing.conformance.checks import CHECKS
from sightline.testing.conformance.checks.covering import cover
from sightline.testing.conformance.domains import domains_of_demand
from sightline.testing.conformance.generator import cases_for
from sightline.testing.conformance.kit import CheckResult, RowReport, try_check, try_row
from sightline.testing.conformance.report import coverage, passed_checks
from sightline.testing.conformance.rig import Subject
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.trial import Check, Effort, Trial

COVERING = "covering"
"""The check that is replaced by cases over the engine's demands."""
_MEMORY_SHARE = 0.8
"""The share of the free memory that a pool may take."""
_NO_ROOM_ON_A_CPU = "can't allocate memory"
"""Part of torch's error message."""


@dataclass(frozen=True)
class Duty:
    """One capability row of a backend, and what it would serve for one group of layers."""

    candidate: Candidate
    label: str
    """The row's label."""
    capability: Capability
    group: LayerGroup
    needs: Mapping[Work, Requirement]
    """What is required of it for each kind of rows that it serves."""
    identity: Identity

    @property
    def demands(self) -> tuple[Demand, ...]:
        return tuple(demand for need in self.needs.values() for demand in need.demands)

    @property
    def subject(self) -> Subject:
        """The row, narrowed to what the engine uses."""
        need = next(iter(self.needs.values()))
        return Subject(self.candidate.name, self.candidate.load(), narrowed(self.capability, need), need.device)


@dataclass(frozen=True)
class CoveredWork:
    """The result of the cases for one kind of rows."""

    work: Work
    result: CheckResult
    left_out: tuple[str, ...]
    """Why cases were not tried."""

    @property
    def num_cases(self) -> int:
        """The number of cases that passed."""
        return len(self.result.points)


@dataclass(frozen=True)
class DutyReport:
    """The result of one duty."""

    duty: Duty
    row: RowReport | None
    """The results of the checks, then those of `works`; None if everything was proven before."""
    works: tuple[CoveredWork, ...]
    gaps: tuple[Gap, ...]
    """What the engine will ask for and no proof covers."""
    voided: bool = False
    """True if this run failed and removed an earlier proof of the row."""

    @property
    def results(self) -> tuple[CheckResult, ...]:
        return () if self.row is None else self.row.results

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        return () if self.row is None else self.row.failed

    @property
    def is_proven(self) -> bool:
        return not self.failed and not self.gaps


@dataclass(frozen=True)
class EngineReport:
    """The result of a run for one engine."""

    blueprint: Blueprint
    notes: tuple[str, ...]
    """Decisions that differ from the config, and what could not be known."""
    duties: tuple[DutyReport, ...]

    @property
    def is_proven(self) -> bool:
        return all(report.is_proven for report in self.duties)

    def to_data(self) -> dict[str, Any]:
        """Returns the report as JSON data."""
        config = self.blueprint.config
        return {
            "command": ["sightline", *self.blueprint.prove_words],
            "device": {"kind": config.device.kind.value, "name": config.device.name},
            "usage": self.blueprint.usage.value,
            "notes": list(self.notes),
            "proven": self.is_proven,
            "duties": [_duty_data(report) for report in self.duties],
        }


@dataclass(frozen=True)
class EngineWatch:
    """Callbacks that report the progress of a run."""

    on_duty: Callable[[Duty], None] = lambda _duty: None
    on_result: Callable[[CheckResult], None] = lambda _result: None


def open_blueprint(config: EngineConfig, ledger: Ledger) -> Blueprint:
    """Returns what serving the config would run, without reading weights."""
    return describe_model(config, ledger).draw_up(ledger)


def prove_engine(
    config: EngineConfig,
    *,
    book: ProofBook,
    candidates: Sequence[Candidate] | None = None,
    checks: Sequence[Check] = CHECKS,
    again: bool = False,
    seconds: float | None = None,
    watch: EngineWatch | None = None,
) -> EngineReport:
    """Proves what serving the config would ask of attention, unless `book` has a proof of it already and not `again`.

    A pass is recorded in the book and joined with earlier proofs of the same row; a failure removes them. `checks` are
    tried besides the cases. Within `seconds`, the cases that cover most for their time are tried, and the report says
    what they leave.
    """
    ledger = Ledger()
    blueprint = open_blueprint(replace(config, require_proof=False), ledger)
    book.prepare()
    run = _EngineRun(
        blueprint.config, book, [check for check in checks if check.name != COVERING], watch or EngineWatch(), again
    )
    duties = list_duties(blueprint, registry.installed() if candidates is None else candidates)
    ends = None if seconds is None else time.monotonic() + seconds
    reports = []
    for number, duty in enumerate(duties):
        left = None if ends is None else max(0.0, ends - time.monotonic()) / (len(duties) - number)
        reports.append(run.prove(duty, left))
    return EngineReport(blueprint, tuple(map(str, ledger)), tuple(reports))


def list_duties(blueprint: Blueprint, candidates: Sequence[Candidate]) -> tuple[Duty, ...]:
    """Lists every capability row that would serve, with its group and the kinds of rows that it would serve."""
    config, usage = blueprint.config, blueprint.usage
    duties = []
    for group, selection in zip(blueprint.groups, blueprint.select(candidates), strict=True):
        served: dict[tuple[str, int], tuple[Selection, dict[Work, Requirement]]] = {}
        for work, each in selection.items():
            _, needs = served.setdefault((each.candidate.name, id(each.capability)), (each, {}))
            needs[work] = requirement(config, group, work, usage)
        for each, needs in served.values():
            rows = each.candidate.rows()
            label = row_labels(rows)[rows.index(each.capability)]
            identity = ProofBook.identify(each.candidate, each.capability, config.device)
            duties.append(Duty(each.candidate, label, each.capability, group, needs, identity))
    return tuple(duties)


def narrowed(row: Capability, need: Requirement) -> Capability:
    """Narrows a row to what is needed, so that every check tries just that."""
    dtypes = {need.cache_dtype}
    if row.cache_dtypes is ANY or need.dtype in row.cache_dtypes:
        # Checks that are not about the cache dtype use the compute dtype.
        dtypes.add(need.dtype)
    spec = need.spec
    return replace(
        row,
        spec_kinds=frozenset({spec.kind}),
        dtypes=frozenset({need.dtype}),
        cache_dtypes=frozenset(dtypes),
        head_dims=frozenset({spec.head_dim}),
        group_sizes=frozenset({spec.group_size}),
        page_sizes=frozenset({need.page_size}),
        expanded_dims=frozenset({spec.expanded_dims}),
        features=row.features & need.features,
    )


def uncovered(covered: Coverage | None, demands: Iterable[Demand]) -> tuple[Gap, ...]:
    """Returns what the demands ask for and is not covered, each gap once."""
    known = Coverage.of(()) if covered is None else covered
    return tuple(dict.fromkeys(gap for demand in demands for gap in known.gaps(demand)))


@dataclass(frozen=True)
class _EngineRun:
    """The settings that all duties of a run share."""

    config: ResolvedConfig
    book: ProofBook
    checks: Sequence[Check]
    watch: EngineWatch
    again: bool

    def prove(self, duty: Duty, seconds: float | None) -> DutyReport:
        before = self._proof(duty)
        if not self.again and before is not None and not uncovered(before.coverage, duty.demands):
            return DutyReport(duty, None, (), ())
        self.watch.on_duty(duty)
        row = report = try_row(duty.subject, Effort.FULL, _samples(duty), self.checks, self.watch.on_result)
        works: list[CoveredWork] = []
        for work, need in duty.needs.items():
            if not report.passed:
                break
            # The random cases need not be tried again for another kind of rows, so the best cases are enough.
            most = math.inf if works and seconds is None else seconds
            budget = None if most is None else most / len(duty.needs)
            works.append(_cover(duty, work, need, self.config, budget))
            report = replace(report, results=(*report.results, works[-1].result))
            self.watch.on_result(works[-1].result)
        if not report.passed:
            return DutyReport(duty, report, tuple(works), uncovered(None, duty.demands), self.book.void(duty.identity))
        # The proof of earlier runs, or of another group that the same row serves.
        earlier = self._proof(duty)
        covered = coverage([report], earlier)
        checks = (*(() if earlier is None else earlier.checks), *passed_checks([row]))
        self.book.record(Proof(duty.identity, covered, tuple(dict.fromkeys(checks)), utc_now()))
        return DutyReport(duty, report, tuple(works), uncovered(covered, duty.demands))

    def _proof(self, duty: Duty) -> Proof | None:
        return self.book.find(duty.candidate, duty.capability, self.config.device)


def _samples(duty: Duty) -> Samples:
    need = next(iter(duty.needs.values()))
    return Samples((need.spec.head_dim,), (need.spec.group_size,), (need.page_size,))


def _cover(duty: Duty, work: Work, need: Requirement, config: ResolvedConfig, seconds: float | None) -> CoveredWork:
    """Tries cases over the demands of one kind of rows, as a check would."""
    subject, samples = duty.subject, _samples(duty)
    left_out: list[str] = []

    def run(trial: Trial) -> None:
        def is_excused(error: Exception) -> bool:
            if _is_out_of_memory(error):
                left_out.append(f"a case does not fit in memory: {trial.progress.case}")
                return True
            return False

        for demand in need.demands:
            domains = domains_of_demand(_widened(demand, config, duty.group), subject, samples)
            most = None if seconds is None else seconds / len(need.demands)
            cover(trial, cases_for(domains, most), domains, is_excused)

    proves = f"Every two ends and values of what {work.value} will be asked for work together"
    result = try_check(Check(f"{COVERING} {work.value}", proves, run), subject, Effort.FULL, samples)
    return CoveredWork(work, result, tuple(dict.fromkeys(left_out)))


def _widened(demand: Demand, config: ResolvedConfig, group: LayerGroup) -> Demand:
    """Widens a demand to the largest pool that the engine could have on this device."""
    # A group that keeps states has no pools to widen.
    if Dimension.POOL_SLOTS not in demand.scales or not _slot_bytes(config, group):
        return demand
    wanted = demand.scales[Dimension.POOL_SLOTS].high
    pages = config.max_rows * -(-config.max_model_len // config.page_size) + PADDING_PAGES
    room = int(_free_bytes(config.device) * _MEMORY_SHARE) // _slot_bytes(config, group)
    most = min(max(wanted, pages * config.page_size), max(room, 1))
    return replace(demand, scales={**demand.scales, Dimension.POOL_SLOTS: Span(min(wanted, most), most)})


def _free_bytes(device: Device) -> int:
    """Returns the free memory, after freeing the pools of earlier cases."""
    gc.collect()
    if device.kind is DeviceKind.CUDA:
        torch.cuda.empty_cache()
    return available_bytes(device)


def _slot_bytes(config: ResolvedConfig, group: LayerGroup) -> int:
    """Returns the cache bytes of one token in all layers of the group, rounded up."""
    pools = group.cache_spec(config.cache_dtype).pools
    return -(-sum(pool.bytes_per_page(config.page_size) for pool in pools) // config.page_size)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _NO_ROOM_ON_A_CPU in str(error)


def _duty_data(report: DutyReport) -> dict[str, Any]:
    duty = report.duty
    return {
        "backend": duty.candidate.name,
        "row": duty.label,
        "group": duty.group.name,
        "layers": len(duty.group.layers),
        "works": [work.value for work in duty.needs],
        "demands": [
            {dimension.name: str(span) for dimension, span in demand.scales.items()}
            | {dimension.name: sorted(map(str, values)) for dimension, values in demand.values.items()}
            for demand in duty.demands
        ],
        "status": "proven before" if report.row is None else "failed" if report.failed else "passed",
        "checks": [result.to_data() for result in report.results],
        "cases": {work.work.value: work.num_cases for work in report.works},
        "left_out": [told for work in report.works for told in work.left_out],
        "not_covered": list(map(str, report.gaps)),
        "voided": report.voided,
    }
