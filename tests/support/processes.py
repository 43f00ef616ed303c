"""The environment of processes that run a module of `support`."""

from __future__ import annotations

import os
from pathlib import Path

import sightline

_TESTS = Path(__file__).parents[1]


def with_support(*without: str) -> dict[str, str]:
    """This process's environment, in which Sightline and `support` are found from any working directory.

    `without` names variables to leave out.
    """
    environment = {name: value for name, value in os.environ.items() if name not in without}
    package = Path(next(iter(sightline.__path__)))
    paths = [str(package.parent), str(_TESTS), environment.get("PYTHONPATH", "")]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
