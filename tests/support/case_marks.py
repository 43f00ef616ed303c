"""Cases by name, of which some are part of every run and the others of `make prove`."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from _pytest.mark.structures import ParameterSet


def routine(cases: Mapping[str, object], *names: str) -> list[ParameterSet]:
    """All cases under their names; those that are not among `names` are proofs."""
    assert set(names) <= cases.keys(), "expected names of cases"
    return [
        pytest.param(case, id=name, marks=() if name in names else pytest.mark.prove) for name, case in cases.items()
    ]
