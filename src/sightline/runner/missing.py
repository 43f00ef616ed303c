"""Lists optional packages that are not installed, what each would add, and whether it would work on this device.

Reads capability rows. Does not import the packages, nor know them by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from sightline.attention.capability import Capability, device_refusals, lacks_package
from sightline.attention.selection import Candidate
from sightline.core.device import Device


@dataclass(frozen=True)
class MissingPackage:
    """A package that backends need and that is not installed."""

    package: str
    """The import name."""
    backends: tuple[str, ...]
    brings: str
    """What it would add, and how to install it."""
    hindrance: str
    """The reason why it would not work on this device; empty if it would."""

    @property
    def text(self) -> str:
        return f"{self.brings} ({self.hindrance})" if self.hindrance else self.brings

    @property
    def line(self) -> str:
        return f"{self.package} is not installed: {self.text}"

    def to_data(self) -> dict[str, Any]:
        """JSON-serializable data."""
        return {**asdict(self), "backends": list(self.backends)}


def missing_packages(candidates: Iterable[Candidate], device: Device) -> tuple[MissingPackage, ...]:
    """The missing packages of the candidates, each once, in the order of the candidates."""
    found: dict[str, list[tuple[Candidate, Capability]]] = {}
    for candidate in candidates:
        for row in candidate.rows():
            if row.package is not None and lacks_package(row):
                found.setdefault(row.package, []).append((candidate, row))
    return tuple(_missing(package, lacking, device) for package, lacking in found.items())


def _missing(package: str, lacking: list[tuple[Candidate, Capability]], device: Device) -> MissingPackage:
    names = tuple(dict.fromkeys(candidate.name for candidate, _ in lacking))
    told = next((candidate.brings for candidate, _ in lacking if candidate.brings), "")
    return MissingPackage(
        package,
        names,
        told or f"backend {', '.join(names)}; install the package that has it",
        _hindrance([row for _, row in lacking], device),
    )


def _hindrance(rows: list[Capability], device: Device) -> str:
    """The reason why no row could run on the device even with the package; empty if one could."""
    kinds = frozenset().union(*(row.devices for row in rows))
    if device.kind not in kinds:
        return f"serves {' and '.join(sorted(kind.value.upper() for kind in kinds))} devices only"
    reasons = [device_refusals(replace(row, package=None), device) for row in rows]
    return "" if not all(reasons) else "; ".join(reasons[0])
