"""Errands: one check of one row, or a share of it, named so that another process can find it again and try it.

Knows what goes between the processes, as data and as bytes, and how names become backends and checks: functions travel
by the place where they can be imported, nothing else as code. Does not know processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar, cast

import msgspec
import torch

from sightline.attention.backends import registry
from sightline.attention.declared_rows import Unloadable
from sightline.attention.proof import Identity, ProofBook
from sightline.attention.selection import Candidate
from sightline.attention.spec import SpecKind
from sightline.core.device import Device, DeviceKind, detect_device
from sightline.core.errors import ConfigError
from sightline.testing.conformance.checks import CHECKS
from sightline.testing.conformance.kit import CheckResult, try_check
from sightline.testing.conformance.rows import RowToTry, list_rows
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.trial import CaseShare, Check, Effort

_MessageT = TypeVar("_MessageT")


@dataclass(frozen=True)
class NamedCandidate:
    """A candidate whose functions are places: module:name."""

    name: str
    by_default: bool
    distribution: str
    load: str
    rows: str
    brings: str

    @staticmethod
    def of(candidate: Candidate) -> NamedCandidate:
        load, rows = _place(candidate.load), _place(candidate.rows)
        return NamedCandidate(
            candidate.name, candidate.by_default, candidate.distribution, load, rows, candidate.brings
        )

    def found(self) -> Candidate:
        load, rows = _at(self.load), _at(self.rows)
        return Candidate(self.name, self.by_default, self.distribution, load, rows, self.brings)


@dataclass(frozen=True)
class NamedCheck:
    """A check whose functions are places: module:name."""

    name: str
    proves: str
    run: str
    after: tuple[str, ...]
    excused: str
    kinds: frozenset[SpecKind]
    alone: bool
    num_shares: int

    @staticmethod
    def of(check: Check) -> NamedCheck:
        run, excused = _place(check.run), _place(check.excused)
        return NamedCheck(
            check.name, check.proves, run, check.after, excused, check.kinds, check.alone, check.num_shares
        )

    def found(self) -> Check:
        run, excused = _at(self.run), _at(self.excused)
        return Check(self.name, self.proves, run, self.after, excused, self.kinds, self.alone, self.num_shares)


@dataclass(frozen=True)
class Brief:
    """What all errands of a run have in common."""

    device_kind: DeviceKind
    device_index: int
    """Among those of its kind."""
    effort: Effort
    candidates: tuple[NamedCandidate, ...] | None
    """None are the installed ones."""
    checks: tuple[NamedCheck, ...] | None
    """None are the kit's."""

    @staticmethod
    def of(
        device: Device, effort: Effort, candidates: Sequence[Candidate] | None, checks: Sequence[Check] | None
    ) -> Brief:
        """Raises `ConfigError` where a function of a candidate or a check cannot be imported."""
        return Brief(
            device.kind,
            device.torch_device.index or 0,
            effort,
            None if candidates is None else tuple(map(NamedCandidate.of, candidates)),
            None if checks is None else tuple(map(NamedCheck.of, checks)),
        )

    def device(self) -> Device:
        """The same one, in this process."""
        if self.device_kind is DeviceKind.CUDA:
            torch.cuda.set_device(self.device_index)
        return detect_device(self.device_kind.value)


@dataclass(frozen=True)
class Errand:
    """One check of one row, or a share of it."""

    backend: str
    row: str
    """The row's label."""
    check: str
    share: CaseShare
    samples: Samples
    identity: Identity | None
    """What a proof would be of; None where the run proves nothing."""


@dataclass(frozen=True)
class ErrandResult:
    """What came of an errand; or why a process can try none for this run, a fault of the run and of no backend."""

    result: CheckResult | None
    refusal: str | None


def packed(message: Brief | Errand | ErrandResult) -> bytes:
    return msgspec.msgpack.encode(message)


def unpacked(message: bytes, kind: type[_MessageT]) -> _MessageT:
    return msgspec.msgpack.decode(message, type=kind)


class Desk:
    """Tries errands of one run. What was found for one is kept for the next."""

    def __init__(self, brief: Brief) -> None:
        """Raises `ConfigError` where something that the brief names cannot be imported here."""
        self._effort = brief.effort
        self._device = brief.device()
        candidates = brief.candidates
        self._candidates = registry.installed() if candidates is None else tuple(each.found() for each in candidates)
        checks = CHECKS if brief.checks is None else tuple(each.found() for each in brief.checks)
        self._checks = {check.name: check for check in checks}
        self._rows: dict[tuple[str, str], RowToTry] = {}

    def attempt(self, errand: Errand) -> CheckResult:
        """What comes of it by itself. Raises `ConfigError` where the row is not that of the run."""
        key = (errand.backend, errand.row)
        if key not in self._rows:
            self._rows[key] = self._find(errand)
        check, subject = self._checks[errand.check], self._rows[key].subject
        return try_check(check, subject, self._effort, errand.samples, share=errand.share)

    def _find(self, errand: Errand) -> RowToTry:
        """This process may have begun long after the run: what was edited in between is not what would be proven."""
        candidate = registry.find(errand.backend, self._candidates)
        listed = list_rows([candidate], self._device)
        found = [row for row in listed if isinstance(row, RowToTry) and row.label == errand.row]
        if not found or errand.identity not in (None, _identity(found[0])):
            others = "".join(f"; {row.reason}" for row in listed if isinstance(row, Unloadable))
            raise ConfigError(
                f"expected {errand.backend} · {errand.row} as it was when the run began, got it changed{others}; run "
                "again, and leave sources and packages as they are meanwhile"
            )
        return found[0]


def _identity(row: RowToTry) -> Identity:
    return ProofBook.identify(row.candidate, row.subject.capability, row.subject.device)


def _place(function: Callable[..., Any]) -> str:
    """Where another process finds a function. Raises `ConfigError` where it would find something else."""
    place = f"{function.__module__}:{function.__qualname__}"
    if "<" in place or _at(place) is not function:
        raise _cannot_travel(place)
    return place


def _at(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise _cannot_travel(f"{place}: {error}") from error
    return cast("Callable[..., Any]", found)


def _cannot_travel(what: str) -> ConfigError:
    return ConfigError(
        f"expected candidates and checks whose functions other processes can import, got {what}; define them at the "
        "top level of a module, or leave jobs at 1"
    )
