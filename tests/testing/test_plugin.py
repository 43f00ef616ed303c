"""The plug-in turns every check of every row into a test of a package's own test run."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from sightline.attention.kinds import SpecKind
from sightline.testing.conformance.checks import CHECKS

pytest_plugins = ["pytester"]

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
BACKEND = """
from dataclasses import replace
from sightline.attention.backends.reference.backend import ReferenceBackend

class Mine(ReferenceBackend):
    '''Forgets the window.'''

    def __init__(self, context):
        super().__init__(replace(context, spec=replace(context.spec, window=None)))

class Elsewhere(ReferenceBackend):
    capabilities = (replace(ReferenceBackend.capabilities[0], package="no_such_package"),)
"""
ENTRY_POINTS = """
[sightline.attention_backends]
mine = mine:Mine
elsewhere = mine:Elsewhere
broken = no_such_module:Mine
"""
ROW = "float32+bfloat16+float16"
NUM_CHECKS = sum(SpecKind.SOFTMAX in check.kinds for check in CHECKS)


@pytest.fixture
def package(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A package with backends of its own, as if it were installed, and one test."""
    info = pytester.mkdir("mine-1.0.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    pytester.makepyfile(mine=BACKEND, test_own="def test_own(): pass")
    monkeypatch.setenv("PYTHONPATH", str(pytester.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Whether this environment has the entry point or not, the plug-in is there once.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return pytester


def run(package: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return package.runpytest_subprocess(
        "-p", "sightline.testing.plugin", "--conformance-quick", "-v", "-rs", *arguments
    )


def test_each_check_is_a_test_and_the_packages_own_tests_run_too(package: pytest.Pytester) -> None:
    result = run(package, "--conformance-backend", "reference", "-k", "causal or window or test_own or host-bounds")
    lines = result.stdout.str()
    for name in ("causal", "window"):
        assert f"conformance::reference::{ROW}::{name} PASSED" in lines
    assert "test_own.py::test_own PASSED" in lines
    assert f"conformance::reference::{ROW}::host-bounds SKIPPED" in lines
    assert "excused: the row declares that it needs exact lengths on the host" in lines
    assert result.ret == 0


def test_a_fault_fails_its_check_with_the_detail_alone_and_blocks_what_builds_on_it(package: pytest.Pytester) -> None:
    result = run(package, "--conformance-backend", "mine", "-k", "mine and (causal or window or features-together)")
    lines = result.stdout.str()
    assert f"conformance::mine::{ROW}::window FAILED" in lines
    assert f"conformance::mine::{ROW}::causal PASSED" in lines
    assert "blocked: builds on window" in lines
    assert "mine::float32+bfloat16+float16::window proves: A query sees the keys" in lines
    assert "of the oracle, got" in lines
    assert "kit.py" not in lines
    assert not [line for line in lines.splitlines() if "plugin.py" in line and not line.startswith("SKIPPED")]
    assert f"collected {NUM_CHECKS + 1} items / {NUM_CHECKS - 3} deselected / 4 selected" in lines
    assert result.ret == 1


def test_a_row_that_cannot_be_tried_here_is_skipped_with_the_reason(package: pytest.Pytester) -> None:
    result = run(package, "--conformance-backend", "elsewhere", "--conformance-device", "cpu")
    result.assert_outcomes(passed=1, skipped=1)
    assert "package no_such_package is not installed" in result.stdout.str()


def test_a_backend_that_cannot_be_imported_fails(package: pytest.Pytester) -> None:
    result = run(package, "--conformance-backend", "broken")
    result.assert_outcomes(passed=1, failed=1)
    assert "No module named 'no_such_module'" in result.stdout.str()
    assert "Traceback" not in result.stdout.str()


def test_an_unknown_backend_is_one_clear_line(package: pytest.Pytester) -> None:
    result = run(package, "--conformance-backend", "flash")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "expected an attention backend out of triton, triton-latent, " in result.stderr.str()
    assert "got 'flash'" in result.stderr.str()


def test_settings_choose_backends_for_a_run_without_paths_alone(package: pytest.Pytester) -> None:
    package.makeini("[pytest]\nconformance_backends =\n    elsewhere\n    broken\n")
    run(package).assert_outcomes(passed=1, skipped=1, failed=1)
    run(package, "test_own.py").assert_outcomes(passed=1)
    run(package, "test_own.py", "--conformance-backend", "elsewhere").assert_outcomes(passed=1, skipped=1)


def test_without_being_asked_it_does_nothing(package: pytest.Pytester) -> None:
    run(package).assert_outcomes(passed=1)


def test_workers_of_xdist_run_each_check_once(package: pytest.Pytester) -> None:
    package.makeini("[pytest]\nconformance_backends = mine\n")
    result = run(package, "-p", "xdist.plugin", "-n", "2", "-k", "mine and (causal or window or scale)")
    lines = result.stdout.str()
    for name, outcome in (("causal", "PASSED"), ("scale", "PASSED"), ("window", "FAILED")):
        assert lines.count(f"{outcome} conformance::mine::{ROW}::{name}") == 1
    assert "PASSED conformance::mine::" in lines
    assert result.ret == 1


def test_it_costs_nothing_to_have_it_installed() -> None:
    code = "import sys, sightline.testing.plugin; print({'torch', 'numpy', 'rich'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "set()"


def test_the_package_registers_it() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    entry = EntryPoint("sightline", project["entry-points"]["pytest11"]["sightline"], "pytest11")
    assert entry.load().__name__ == "sightline.testing.plugin"
