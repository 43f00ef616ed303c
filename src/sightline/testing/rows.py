"""The rows that there are to try: every capability row of every backend, once for each kind of attention.

Knows backends and a device. Does not know the checks, nor what came of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sightline.attention.capability import Capability, device_refusals
from sightline.attention.proof import dtype_name
from sightline.attention.selection import Candidate
from sightline.attention.spec import SpecKind
from sightline.core.device import Device
from sightline.core.errors import ConfigError
from sightline.testing.bench import Subject
from sightline.testing.trial import cache_dtypes, compute_dtypes


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


@dataclass(frozen=True)
class Unloadable:
    """A backend that cannot even be imported, which is a failure."""

    backend: str
    reason: str


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


def row_labels(rows: Sequence[Capability]) -> tuple[str, ...]:
    """A short name for each row of a backend: its dtypes, and a number where others have the same."""
    names = ["+".join(sorted(map(dtype_name, row.dtypes), key=_by_width)) or "no dtype" for row in rows]
    return tuple(
        name if names.count(name) == 1 else f"{name}#{names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    )


def not_here(capability: Capability, device: Device) -> tuple[str, ...]:
    """Why a row cannot be tried on a device, whatever is asked of it."""
    if not capability.spec_kinds:
        return ("declares no kind of attention",)
    if not compute_dtypes(capability) or not cache_dtypes(capability):
        return ("the kit has no oracle for its dtypes",)
    return device_refusals(capability, device)


def _by_width(dtype: str) -> tuple[int, str]:
    return (-int("".join(filter(str.isdigit, dtype)) or 0), dtype)
