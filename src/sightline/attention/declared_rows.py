"""Names of capability rows, and whether a device can run them. Does not know how a row is tested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sightline.attention.capability import Capability, device_refusals
from sightline.attention.oracle.dtypes import cache_dtypes, compute_dtypes
from sightline.attention.proof import dtype_name
from sightline.core.device import Device


@dataclass(frozen=True)
class Unloadable:
    """A backend that cannot be imported; counts as a failure."""

    backend: str
    reason: str


def row_labels(rows: Sequence[Capability]) -> tuple[str, ...]:
    """A short name for each row of a backend: its dtypes, plus a number if several rows share them."""
    names = ["+".join(sorted(map(dtype_name, row.dtypes), key=_by_width)) or "no dtype" for row in rows]
    return tuple(
        name if names.count(name) == 1 else f"{name}#{names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    )


def not_here(capability: Capability, device: Device) -> tuple[str, ...]:
    """Reasons why a row cannot be tested on a device at all."""
    if not capability.spec_kinds:
        return ("declares no kind of attention",)
    if not compute_dtypes(capability) or not cache_dtypes(capability):
        return ("the kit has no oracle for its dtypes",)
    return device_refusals(capability, device)


def _by_width(dtype: str) -> tuple[int, str]:
    return (-int("".join(filter(str.isdigit, dtype)) or 0), dtype)
