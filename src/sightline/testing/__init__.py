"""The conformance kit: proves that a backend does what its capability rows and the contract say, on your own device.

    from sightline.testing import run_conformance
    assert not run_conformance(["mine"]).failed

`run_conformance` takes backends by name, as the registry has them: all rows, all checks, and a proof on record.
`try_row` takes a `Subject`, a class that need not be registered, and returns a `RowReport`: for the time while a
backend is written. `sightline conformance` and the pytest plug-in are the same from a shell. Importing this package is
cheap: torch comes with the first name.
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
    "Check": "trial",
    "CheckFailed": "trial",
    "CheckResult": "kit",
    "ConformanceReport": "report",
    "Effort": "trial",
    "RowReport": "kit",
    "Samples": "samples",
    "Subject": "rig",
    "Verdict": "kit",
    "list_rows": "rows",
    "run_conformance": "report",
    "try_check": "kit",
    "try_row": "kit",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'sightline.testing' has no attribute {name!r}")
    return getattr(import_module(f"sightline.testing.conformance.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
