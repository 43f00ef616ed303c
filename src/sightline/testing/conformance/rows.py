"""The rows that there are to try: every capability row of every backend, once for each kind of attention.

Knows backends and a device. Does not know the checks, nor what came of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sightline.attention.declared_rows import Unloadable, not_here, row_labels
from sightline.attention.selection import Candidate
from sightline.attention.spec import SpecKind
from sightline.core.device import Device
from sightline.core.errors import ConfigError
from sightline.testing.conformance.rig import Subject


@dataclass(frozen=True)
class RowToTry:
    """A capability row that can be tried here, for one kind of attention."""

    candidate: Candidate
    label: str
    """Tells the row from the backend's others: its dtypes, and the kind where it has several."""
    subject: Subject
    is_whole: bool = True
    """No other kind of the row is tried after this one: what is proven is all of a row."""


@dataclass(frozen=True)
class SkippedRow:
    """A capability row that cannot be tried here: neither proven nor refuted."""

    backend: str
    label: str
    reasons: tuple[str, ...]


def list_rows(candidates: Sequence[Candidate], device: Device) -> tuple[RowToTry | SkippedRow | Unloadable, ...]:
    """Every row of every backend, each with why it cannot be tried on the device if it cannot."""
    listed: list[RowToTry | SkippedRow | Unloadable] = []
    for candidate in candidates:
        try:
            listed += _rows_of(candidate, device)
        except ConfigError as error:
            listed.append(Unloadable(candidate.name, str(error)))
    return tuple(listed)


def _rows_of(candidate: Candidate, device: Device) -> list[RowToTry | SkippedRow | Unloadable]:
    """A backend none of whose rows can be tried here is not loaded."""
    rows = candidate.rows()
    if not rows:
        return [SkippedRow(candidate.name, "no row", ("declares no capability",))]
    listed: list[RowToTry | SkippedRow | Unloadable] = []
    for label, capability in zip(row_labels(rows), rows, strict=True):
        reasons = not_here(capability, device)
        if reasons:
            listed.append(SkippedRow(candidate.name, label, reasons))
        else:
            listed += _each_kind(candidate, label, Subject(candidate.name, candidate.load(), capability, device))
    return listed


def _each_kind(candidate: Candidate, label: str, subject: Subject) -> list[RowToTry]:
    """A row is tried once for each kind of attention that it declares."""
    kinds = [kind for kind in SpecKind if kind in subject.capability.spec_kinds]
    return [
        RowToTry(
            candidate,
            label if len(kinds) == 1 else f"{label} {kind.value}",
            replace(subject, named_kind=kind),
            is_whole=kind is kinds[-1],
        )
        for kind in kinds
    ]
