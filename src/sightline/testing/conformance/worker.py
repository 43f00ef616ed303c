"""A process that tries checks for `crew`, one at a time, until its connection closes; and the messages that it gets.

The first message is a `Brief`, each later one an `Errand`, which names a backend, a row and a check for the worker to
find. The answer to an errand is a `CheckResult`; a `ConfigError` instead ends the run without failing a check. Messages
are pickled, so a function travels as the name under which the worker can import it.
"""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread

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


def main() -> None:
    """Runs a worker. The only argument is the descriptor of its end of a `multiprocessing.Pipe`."""
    torch.set_num_threads(1)
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    received: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_receive, args=(connection, received), daemon=True).start()
    try:
        desk = Desk(pickle.loads(received.get()))
    except Exception as error:  # whatever importing a backend or a check raises
        connection.send(ConfigError(f"expected a process that can try checks, got {_told(error)}"))
        return
    try:
        while True:
            connection.send(desk.attempt(pickle.loads(received.get())))
    except ConfigError as error:
        connection.send(ConfigError(str(error)))


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}; try fewer jobs"


def _receive(connection: Connection, received: SimpleQueue[bytes]) -> None:
    """Exits the process when the connection closes, even in the middle of a check: nobody would read its result."""
    try:
        while True:
            received.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)
