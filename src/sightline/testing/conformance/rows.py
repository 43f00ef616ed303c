"""The rows of a run: every capability row of every backend, once for each kind of attention.

Knows backends and a device. Does not know the checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from sightline.attention.declared_rows import Unloadable, not_here, row_labels
from sightline.attention.kinds import SpecKind
from sightline.attention.proof import Identity
from sightline.attention.selection import Candidate
from sightline.core.device import Device
from sightline.core.errors import ConfigError
from sightline.testing.conformance.rig import Subject
from sightline.testing.conformance.samples import Samples

if TYPE_CHECKING:
    from sightline.testing.conformance.kit import CheckResult


@dataclass(frozen=True)
class RowToTry:
    """A capability row that can be tried on this device, for one kind of attention."""

    candidate: Candidate
    label: str
    """Identifies the row among the backend's rows: its dtypes, and the kind of attention if it has several."""
    subject: Subject
    is_whole: bool = True
    """True for the last kind of the row: a proof needs all of them."""


@dataclass(frozen=True)
class SkippedRow:
    """A capability row that cannot be tried on this device. It is neither proven nor refuted."""

    backend: str
    label: str
    reasons: tuple[str, ...]


ListedRow: TypeAlias = RowToTry | SkippedRow | Unloadable


@dataclass(frozen=True)
class PreparedRow:
    """A row, with what is fixed before the first check of a run."""

    row: RowToTry
    samples: Samples
    """The requested samples and those of the kind of attention."""
    not_listed: tuple[str, ...]
    """Requested values that the row does not declare."""
    identity: Identity | None
    """The identity of the row's proof; None if the run records no proofs."""


@dataclass(frozen=True)
class Watch:
    """Callbacks that report the progress of a run."""

    on_row: Callable[[RowToTry], None] = lambda _row: None
    """The first check of a row begins."""
    on_result: Callable[[RowToTry, CheckResult], None] = lambda _row, _result: None
    """A check is done. With several jobs it may be done before those that it builds on: only the final report says
    whether it is blocked."""


def list_rows(candidates: Sequence[Candidate], device: Device) -> tuple[ListedRow, ...]:
    """Lists every row of every backend; a row that cannot be tried on the device comes with the reasons."""
    listed: list[ListedRow] = []
    for candidate in candidates:
        try:
            listed += _rows_of(candidate, device)
        except ConfigError as error:
            listed.append(Unloadable(candidate.name, str(error)))
    return tuple(listed)


def _rows_of(candidate: Candidate, device: Device) -> list[ListedRow]:
    """Imports the backend only if one of its rows can be tried."""
    rows = candidate.rows()
    if not rows:
        return [SkippedRow(candidate.name, "no row", ("declares no capability",))]
    listed: list[ListedRow] = []
    for label, capability in zip(row_labels(rows), rows, strict=True):
        reasons = not_here(capability, device)
        if reasons:
            listed.append(SkippedRow(candidate.name, label, reasons))
            continue
        subject = Subject(candidate.name, candidate.load(), capability, device)
        kinds = [kind for kind in SpecKind if kind in capability.spec_kinds]
        for kind in kinds:
            told = label if len(kinds) == 1 else f"{label} {kind.value}"
            listed.append(RowToTry(candidate, told, replace(subject, named_kind=kind), kind is kinds[-1]))
    return listed
