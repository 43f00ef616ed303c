"""Errands: one check of one row, named so that another process can find it again and try it.

Knows what goes between the processes, and how names become backends and checks. Does not know processes.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from sightline.attention.backends import registry
from sightline.attention.proof import Identity, ProofBook
from sightline.attention.selection import Candidate
from sightline.core.device import Device
from sightline.core.errors import ConfigError
from sightline.testing.checks import CHECKS
from sightline.testing.kit import CheckResult, try_check
from sightline.testing.rows import RowToTry, list_rows
from sightline.testing.samples import Samples
from sightline.testing.trial import Check, Effort


@dataclass(frozen=True)
class Brief:
    """What all errands of a run have in common."""

    device: Device
    effort: Effort
    candidates: tuple[Candidate, ...] | None
    """None are the installed ones."""
    checks: tuple[Check, ...] | None
    """None are the kit's."""

    def packed(self) -> bytes:
        """Raises `ConfigError` where it cannot travel: functions do by their names alone."""
        try:
            return pickle.dumps(self)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise _cannot_travel(error) from error

    @staticmethod
    def unpacked(packed: bytes) -> Brief:
        """Raises `ConfigError` where this process cannot import what it is made of."""
        try:
            brief: Brief = pickle.loads(packed)
        except Exception as error:  # the border to other people's code: to unpack is to import it
            raise _cannot_travel(error) from error
        return brief


@dataclass(frozen=True)
class Errand:
    """One check of one row."""

    backend: str
    row: str
    """The row's label."""
    check: str
    samples: Samples
    identity: Identity | None
    """What a proof would be of; None where the run proves nothing."""


@dataclass(frozen=True)
class Refusal:
    """Why a process cannot try anything for this run: a fault of the run, and of no backend."""

    reason: str


class Desk:
    """Tries errands of one run. What was found for one is kept for the next."""

    def __init__(self, brief: Brief) -> None:
        self._brief = brief
        self._candidates = registry.installed() if brief.candidates is None else brief.candidates
        self._checks = {check.name: check for check in (CHECKS if brief.checks is None else brief.checks)}
        self._rows: dict[tuple[str, str], RowToTry] = {}

    def attempt(self, errand: Errand) -> CheckResult:
        """What comes of the check by itself. Raises `ConfigError` where the row is not that of the run."""
        key = (errand.backend, errand.row)
        if key not in self._rows:
            self._rows[key] = self._find(errand)
        return try_check(self._checks[errand.check], self._rows[key].subject, self._brief.effort, errand.samples)

    def _find(self, errand: Errand) -> RowToTry:
        """This process may have begun long after the run: what was edited in between is not what would be proven."""
        candidate = registry.find(errand.backend, self._candidates)
        listed = list_rows([candidate], self._brief.device)
        found = [row for row in listed if isinstance(row, RowToTry) and row.label == errand.row]
        if not found or errand.identity not in (None, _identity(found[0])):
            raise ConfigError(
                f"expected {errand.backend} · {errand.row} as it was when the run began, got it changed; run again, "
                "and leave sources and packages as they are meanwhile"
            )
        return found[0]


def _identity(row: RowToTry) -> Identity:
    return ProofBook.identify(row.candidate, row.subject.capability, row.subject.device)


def _cannot_travel(error: Exception) -> ConfigError:
    return ConfigError(
        f"expected candidates and checks that other processes can import, got {type(error).__name__}: {error}; "
        "define them at the top level of a module, or leave jobs at 1"
    )
