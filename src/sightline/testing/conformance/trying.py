"""Trying the rows of a run: whom a run asks what came of a row, and the plain answer, one check after the other.

Does not know what a report means, nor where proofs are kept. `SideBySide`, in `crew`, is the other answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sightline.attention.proof import Identity
from sightline.testing.conformance.kit import CheckResult, RowReport, try_row
from sightline.testing.conformance.rows import RowToTry
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.trial import Check, Effort


@dataclass(frozen=True)
class PreparedRow:
    """A row, with what was settled about it before the first check of the run."""

    row: RowToTry
    samples: Samples
    """Those that were asked for, and those of the kind of attention."""
    not_listed: tuple[str, ...]
    """Values that were asked for and that the row does not declare."""
    identity: Identity | None
    """What a proof would be of; None where the run proves nothing."""


@dataclass(frozen=True)
class Watch:
    """Who is told while a run is on its way."""

    on_row: Callable[[RowToTry], None] = lambda _row: None
    """The first check of a row begins."""
    on_result: Callable[[RowToTry, CheckResult], None] = lambda _row, _result: None
    """As it comes. Side by side a check may come before those that it builds on: whether it is blocked by them, the
    report says."""


class Trier(ABC):
    """Tries the rows of one run."""

    @abstractmethod
    def report(self, prepared: PreparedRow) -> RowReport:
        """What came of a row's checks, in their order."""

    @abstractmethod
    def close(self) -> None:
        """Leaves nothing running."""


class InTurn(Trier):
    """In this process, a row when it is asked for."""

    def __init__(self, effort: Effort, checks: Sequence[Check], watch: Watch) -> None:
        self._effort = effort
        self._checks = tuple(checks)
        self._watch = watch

    def report(self, prepared: PreparedRow) -> RowReport:
        row = prepared.row
        self._watch.on_row(row)
        return try_row(
            row.subject,
            self._effort,
            prepared.samples,
            self._checks,
            lambda result: self._watch.on_result(row, result),
        )

    def close(self) -> None:
        """There is nothing to end."""
