"""The messages from `crew` to its workers, and the object with which a worker carries them out.

A message names a backend, a row and a check, and the worker finds them again. Messages are pickled, so a function
travels as the name under which the worker can import it. Does not know processes.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import torch

from sightline.attention.backends import registry
from sightline.attention.declared_rows import Unloadable
from sightline.attention.proof import Identity, ProofBook
from sightline.attention.selection import Candidate
from sightline.core.device import Device, DeviceKind
from sightline.core.errors import ConfigError
from sightline.testing.conformance.checks import CHECKS
from sightline.testing.conformance.kit import CheckResult, try_check
from sightline.testing.conformance.rows import RowToTry, list_rows
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.trial import CaseShare, Check, Effort


@dataclass(frozen=True)
class Brief:
    """What all errands of a run have in common."""

    device: Device
    effort: Effort
    candidates: tuple[Candidate, ...] | None
    """None for the installed backends."""
    checks: tuple[Check, ...] | None
    """None for the kit's own checks."""

    def pickled(self) -> bytes:
        """Raises `ConfigError` if a function of a candidate or a check cannot be imported by name."""
        try:
            return pickle.dumps(self)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"expected candidates and checks whose functions other processes can import, got {error}; define them "
                "at the top level of a module, or leave jobs at 1"
            ) from error


@dataclass(frozen=True)
class Errand:
    """One check of one row, or a share of its cases."""

    backend: str
    row: str
    """The row's label."""
    check: str
    share: CaseShare
    samples: Samples
    identity: Identity | None
    """The identity of the row's proof; None if the run records no proofs."""


class Desk:
    """Carries out the errands of one run. Rows are looked up once."""

    def __init__(self, brief: Brief) -> None:
        self._effort = brief.effort
        self._device = brief.device
        if brief.device.kind is DeviceKind.CUDA:
            torch.cuda.set_device(brief.device.torch_device)
        self._candidates = registry.installed() if brief.candidates is None else brief.candidates
        self._checks = {check.name: check for check in brief.checks or CHECKS}
        self._rows: dict[tuple[str, str], RowToTry] = {}

    def attempt(self, errand: Errand) -> CheckResult:
        """Tries the check, whatever it builds on. Raises `ConfigError` if the row changed since the run began."""
        key = (errand.backend, errand.row)
        if key not in self._rows:
            self._rows[key] = self._find(errand)
        check, subject = self._checks[errand.check], self._rows[key].subject
        return try_check(check, subject, self._effort, errand.samples, share=errand.share)

    def _find(self, errand: Errand) -> RowToTry:
        """A worker may start long after the run began. A row edited in between is not the one that would be proven."""
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
