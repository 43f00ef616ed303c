"""Declared dependencies: each has a lowest version, is pinned within its range, and is described."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.pinned import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_LINES = (ROOT / "constraints.txt").read_text().split()
PINNED = {canonicalize_name(name): version for name, version in (line.split("==") for line in _LINES)}


@pytest.mark.parametrize("declared", PROJECT["dependencies"])
def test_a_dependency_has_a_lowest_version_and_is_pinned_and_described(declared: str) -> None:
    requirement = Requirement(declared)
    lowest = [each.version for each in requirement.specifier if each.operator == ">="]
    assert len(lowest) == 1, f"state the lowest version of {requirement.name} that `make lowest` passes with"
    assert requirement.specifier.contains(PINNED[canonicalize_name(requirement.name)])
    rows = (ROOT / "docs" / "dependencies.md").read_text().splitlines()
    assert any(row.startswith(f"| {requirement.name} | {lowest[0]}") for row in rows)


@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"]))
def test_what_is_pinned_is_within_the_ranges_of_extras(extra: str) -> None:
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        pinned = PINNED.get(canonicalize_name(requirement.name))
        assert pinned is None or requirement.specifier.contains(pinned)
