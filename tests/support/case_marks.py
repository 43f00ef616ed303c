"""Cases by name: some are part of every run, some of `make prove`, and some run only if slow tests are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from _pytest.mark.structures import ParameterSet


def routine(cases: Mapping[str, object], *names: str) -> list[ParameterSet]:
    """All cases under their names; those that are not among `names` are proofs."""
    assert set(names) <= cases.keys(), "expected names of cases"
    return [
        pytest.param(case, id=name, marks=() if name in names else pytest.mark.prove) for name, case in cases.items()
    ]


def seldom(names: Iterable[str], *proven: str) -> list[ParameterSet]:
    """All names of a proof's cases; those that are not among `proven` run only if slow tests are asked for."""
    known = list(names)
    assert set(proven) <= set(known), "expected names of cases"
    return [pytest.param(name, marks=() if name in proven else pytest.mark.slow) for name in known]


def proofs(*values: object) -> list[ParameterSet]:
    """Values of one parameter whose cases are proofs. Values beside them are part of every run."""
    return [pytest.param(value, marks=pytest.mark.prove) for value in values]
