"""The conformance kit: proves on your device that a backend does what its capability rows and the contract say.

    from sightline.testing import run_conformance
    assert not run_conformance(["mine"]).failed

`run_conformance` tries all checks on all rows of registered backends, by name, and records proofs. `try_row` tries one
row of a `Subject`, whose class need not be registered, and returns a `RowReport`; use it while you write a backend. The
command `sightline conformance` and the pytest plug-in do the same. Importing this package is cheap: torch is imported
with the first name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sightline.testing.conformance.kit import CheckResult, RowReport, Verdict, try_check, try_row
    from sightline.testing.conformance.report import ConformanceReport, run_conformance
    from sightline.testing.conformance.rig import Subject
    from sightline.testing.conformance.rows import list_rows
    from sightline.testing.conformance.samples import Samples
    from sightline.testing.conformance.trial import Check, CheckFailed, Effort

__all__ = [
    "Check",
    "CheckFailed",
    "CheckResult",
    "ConformanceReport",
    "Effort",
    "RowReport",
    "Samples",
    "Subject",
    "Verdict",
    "list_rows",
    "run_conformance",
    "try_check",
    "try_row",
]

_HOMES = {
    "kit": ("CheckResult", "RowReport", "Verdict", "try_check", "try_row"),
    "report": ("ConformanceReport", "run_conformance"),
    "rig": ("Subject",),
    "rows": ("list_rows",),
    "samples": ("Samples",),
    "trial": ("Check", "CheckFailed", "Effort"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"sightline.testing.conformance.{home}"), name)
    raise AttributeError(f"module 'sightline.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
