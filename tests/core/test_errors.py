"""The tree that the module draws is the tree that the classes form."""

from __future__ import annotations

import inspect
import re

import pytest

from sightline.core import errors
from sightline.core.errors import SightlineError, StalePlanError, UnplannedBatchError

_NODE = re.compile(r"^ {4}(?P<branches>[│├└─ ]*)(?P<name>[A-Z]\w+)(?: |$)")
_LEVEL = len("├── ")


def drawn_tree() -> dict[str, str | None]:
    """Each class in the docstring's drawing, and the class that it hangs from."""
    assert errors.__doc__ is not None
    path: list[str] = []
    parents: dict[str, str | None] = {}
    for line in errors.__doc__.splitlines():
        if node := _NODE.match(line):
            depth, rest = divmod(len(node["branches"]), _LEVEL)
            assert rest == 0, f"branches of uneven width: {line!r}"
            del path[depth:]
            parents[node["name"]] = path[-1] if path else None
            path.append(node["name"])
    return parents


def real_tree() -> dict[str, str | None]:
    """Each error class of the module, and its base in the tree."""
    classes = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]
    parents: dict[str, str | None] = {}
    for error in classes:
        bases = [base.__name__ for base in error.__bases__ if issubclass(base, SightlineError)]
        assert len(bases) <= 1, f"{error.__name__} hangs from two places"
        parents[error.__name__] = bases[0] if bases else None
    return parents


def test_the_drawn_tree_is_the_real_tree() -> None:
    assert drawn_tree() == real_tree()
    assert len(drawn_tree()) > 10


def test_the_root_is_the_only_class_without_a_parent() -> None:
    assert [name for name, parent in real_tree().items() if parent is None] == ["SightlineError"]


@pytest.mark.parametrize("name", sorted(real_tree()))
def test_every_error_says_what_it_means(name: str) -> None:
    assert vars(errors)[name].__doc__


def test_an_unplanned_batch_is_a_type_error_too() -> None:
    assert issubclass(UnplannedBatchError, TypeError)


def test_a_stale_plan_names_each_change_and_the_remedy() -> None:
    error = StalePlanError(["rows was 2, is 3", "batch was 7, is 8"], "Plan again.")
    assert error.changes == ("rows was 2, is 3", "batch was 7, is 8")
    assert str(error) == "the plan is stale: rows was 2, is 3; batch was 7, is 8. Plan again."
