"""A failed test is named while the run goes on, whichever process runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.named_failures import error_line

pytest_plugins = ["pytester"]

CONFTEST = """
import pytest
from support.named_failures import NamedFailures

@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(NamedFailures(terminal))
"""
TESTS = """
import pytest

@pytest.fixture
def broken():
    raise OSError("expected a fixture, got none")

def test_right(): pass
def test_wrong(): assert [1] == [2], "expected one"
def test_broken(broken): pass
"""


@pytest.mark.parametrize("processes", [(), ("-p", "xdist", "-n", "1")], ids=["here", "xdist"])
def test_each_failure_is_named_before_the_summary(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, processes: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_some=TESTS)
    said = pytester.runpytest_subprocess("-q", *processes).stdout.str()
    at_once, _, _ = said.partition("= ERRORS =")
    named = [line for line in at_once.splitlines() if line.startswith("FAILED ")]
    assert named == [
        "FAILED test_some.py::test_wrong (call): AssertionError: expected one",
        "FAILED test_some.py::test_broken (setup): OSError: expected a fixture, got none",
    ]


def test_the_last_error_of_a_chain_is_told_by_its_first_line() -> None:
    chain = "E   ValueError: first\n\nDuring handling of it:\nE   KeyError: second\nE     more\nfile.py:3: KeyError"
    assert error_line(chain) == "KeyError: second"
    assert error_line("worker 'gw0' crashed while running 'test'") == "worker 'gw0' crashed while running 'test'"
    assert error_line("") == ""


@pytest.mark.prove
def test_a_proof_has_more_time_than_other_tests(request: pytest.FixtureRequest) -> None:
    timeout = request.node.get_closest_marker("timeout")
    assert timeout.args[0] > float(request.config.getini("timeout"))
