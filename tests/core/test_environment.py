"""Environment variables are read in one file, and a malformed one is refused."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sightline
from sightline.core.environment import proof_folder
from sightline.core.errors import ConfigError

ROOT = Path(sightline.__file__).parent


def test_proofs_lie_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert proof_folder() == tmp_path / "sightline" / "proofs"


@pytest.mark.parametrize("empty", [True, False])
def test_without_a_named_cache_it_is_the_usual_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    if not empty:
        monkeypatch.delenv("XDG_CACHE_HOME")
    assert proof_folder() == tmp_path / ".cache" / "sightline" / "proofs"


def test_a_relative_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    with pytest.raises(ConfigError, match="expected an absolute path in XDG_CACHE_HOME, got 'here'"):
        proof_folder()


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(ConfigError, match="set HOME or XDG_CACHE_HOME to a folder"):
        proof_folder()


def test_nothing_else_reads_the_environment() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call | ast.Subscript)
        and ast.unparse(node.func if isinstance(node, ast.Call) else node.value).startswith(
            ("os.environ", "os.getenv", "environ")
        )
        and isinstance(node.ctx if isinstance(node, ast.Subscript) else ast.Load(), ast.Load)
    }
    assert readers == {"core/environment.py"}
