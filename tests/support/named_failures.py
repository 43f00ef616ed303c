"""Names each failed test at once: a run that is killed never comes to its summary."""

from __future__ import annotations

import pytest


class NamedFailures:
    """A plug-in that writes the name of a failed test, and the first line of its error, when the report comes."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            told = f"FAILED {report.nodeid} ({report.when}): {error_line(report.longreprtext)}"
            # The terminal does not know that it is behind the dots of a line.
            self._terminal.write_line(f"\n{told}")


def error_line(text: str) -> str:
    """Returns the first line of the last error in a failure's text; pytest begins the lines of an error with E.

    The text of a failure without such lines ends with what went wrong.
    """
    lines = text.splitlines() or [""]
    begins = [
        line for before, line in zip(["", *lines], lines, strict=False) if is_error(line) and not is_error(before)
    ]
    return begins[-1].removeprefix("E").strip() if begins else lines[-1]


def is_error(line: str) -> bool:
    return line.startswith("E  ")
