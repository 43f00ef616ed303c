"""Rules of the source that no linter holds: no probing, no hidden globals, files and functions that can be read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import sightline

ROOT = Path(sightline.__file__).parent
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_USUAL_FUNCTION_LINES = 40


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            yield path, node


def test_nothing_is_probed_for_attributes() -> None:
    probes = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, node in nodes()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (node.func.id in ("hasattr", "setattr") or (node.func.id == "getattr" and len(node.args) == 3))
    ]
    assert probes == []


def test_no_function_rebinds_a_global() -> None:
    assert [f"{path}:{node.lineno}" for path, node in nodes() if isinstance(node, ast.Global)] == []


def test_backends_inherit_from_the_contract_alone() -> None:
    bases = {
        (node.name, ast.unparse(base))
        for path, node in nodes()
        if path.parent.name == "backends" and isinstance(node, ast.ClassDef)
        for base in node.bases
    }
    assert {base.split("[")[0] for _, base in bases} == {"AttentionBackend", "AttentionPlan"}


def test_files_and_functions_stay_readable() -> None:
    lengths = sorted(
        node.end_lineno - node.lineno + 1
        for _, node in nodes()
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None
    )
    assert lengths[-1] <= MAX_FUNCTION_LINES
    assert lengths[int(len(lengths) * 0.95)] <= MAX_USUAL_FUNCTION_LINES
    assert max(len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")) <= MAX_FILE_LINES


def test_every_module_says_what_it_owns() -> None:
    undocumented = [
        str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert undocumented == []
