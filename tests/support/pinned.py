"""Interfaces of other packages that are not documented, and on which security limits rest.

Such a package has an upper bound in pyproject.toml, and a test that fails when the interface changes.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def declared(package: str) -> Requirement:
    """What pyproject.toml says about a package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [found] = [each for each in map(Requirement, project["dependencies"]) if each.name == package]
    return found


def check_range(package: str, advice: str) -> None:
    """Asserts that a range is declared, and that the installed version is in it."""
    specifier = declared(package).specifier
    operators = {each.operator for each in specifier}
    assert operators == {">=", "<"}, f"expected a lower and an upper bound of {package}, got {specifier}. {advice}"
    installed = version(package)
    assert specifier.contains(installed), f"expected {package}{specifier}, got {installed}. {advice}"


def check_signatures(owner: type, expected: Mapping[str, str], advice: str) -> None:
    """Asserts that methods exist and have these parameters, without annotations and `self`."""
    for name, parameters in expected.items():
        assert name in dir(owner), f"{owner.__name__}.{name} is gone. {advice}"
        found = _shown(getattr(owner, name))
        assert found == parameters, f"{owner.__name__}.{name}: expected ({parameters}), got ({found}). {advice}"


def _shown(function: object) -> str:
    assert callable(function)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return ", ".join(str(each.replace(annotation=inspect.Parameter.empty)) for each in parameters)


def overridden(subclass: type, base: type) -> set[str]:
    """Names that a class takes the place of in its base."""
    return {name for name in vars(subclass) if name in dir(base) and not name.startswith("__")}
