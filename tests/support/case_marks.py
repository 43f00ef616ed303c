"""Cases by name: some are part of every run, some of `make prove`, and some run only if slow tests are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

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


class Named(Protocol):
    """A case that has a name."""

    @property
    def name(self) -> str: ...


def of_families(cases: Iterable[tuple[str, Named]], *proven: str) -> list[ParameterSet]:
    """All cases of all families; those of families that are not among `proven` run only if slow tests are asked for."""
    known = list(cases)
    assert set(proven) <= {family for family, _ in known}, "expected names of families"
    return [
        pytest.param(family, case, id=f"{family}-{case.name}", marks=() if family in proven else pytest.mark.slow)
        for family, case in known
    ]


def proofs(*values: object) -> list[ParameterSet]:
    """Values of one parameter whose cases are proofs. Values beside them are part of every run."""
    return [pytest.param(value, marks=pytest.mark.prove) for value in values]
