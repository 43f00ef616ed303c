"""The pytest plug-in: runs each check of each row of a backend as a test.

    pytest --conformance-backend mine            once
    conformance_backends = ["mine"]              in pytest's settings: whenever pytest is run without paths

Tests are named `conformance::mine::float32::window`, and `-k` selects them. They record no proof, because they may run
in several processes and in any selection: `sightline conformance` does. Imports nothing heavy until it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from sightline.testing.conformance.kit import CheckResult
    from sightline.testing.conformance.rows import ListedRow, RowToTry
    from sightline.testing.conformance.trial import Check


class ConformanceFailure(Exception):  # noqa: N818 - the name is what pytest prints
    """A check failed; the message is its detail."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sightline", "conformance of attention backends")
    group.addoption(
        "--conformance-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="Try this attention backend against the contract; may be repeated.",
    )
    group.addoption("--conformance-quick", action="store_true", help="A few cases of each check.")
    group.addoption("--conformance-device", default="auto", metavar="DEVICE", help="auto, cpu or cuda.")
    parser.addini(
        "conformance_backends", "Attention backends to try whenever pytest is run without paths.", type="linelist"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the backends. Stores them in the options, for workers of pytest-xdist, which always have paths."""
    if not config.option.conformance_backend and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.option.conformance_backend = config.getini("conformance_backends")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Adds the tests. Runs before pytest's own hook, so that -k and -m apply to them."""
    if session.config.option.conformance_backend:
        rows = _rows(session.config)
        collector = _Conformance.from_parent(session, name="conformance", nodeid="conformance", rows=rows)
        report = session.ihook.pytest_make_collect_report(collector=collector)
        session.ihook.pytest_collectreport(report=report)  # so that they are counted
        items.extend(report.result)


def _rows(config: pytest.Config) -> Sequence[ListedRow]:
    """Lists every row of the requested backends."""
    from sightline.attention.backends import registry
    from sightline.core.device import detect_device
    from sightline.core.errors import ConfigError
    from sightline.testing.conformance.rows import list_rows

    try:
        installed = registry.installed()
        chosen = [registry.find(name, installed) for name in dict.fromkeys(config.option.conformance_backend)]
        return list_rows(chosen, detect_device(config.option.conformance_device))
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from error


class _Conformance(pytest.Collector):
    """The parent of all checks."""

    def __init__(self, *, rows: Sequence[ListedRow], **node: Any) -> None:
        super().__init__(**node)
        self._rows = rows

    def collect(self) -> Iterator[pytest.Item]:
        from sightline.attention.declared_rows import Unloadable
        from sightline.testing.conformance.kit import checks_of
        from sightline.testing.conformance.rows import SkippedRow

        for row in self._rows:
            match row:
                case Unloadable(backend, reason):
                    yield _Untried.from_parent(self, name=backend, failure=ConformanceFailure(reason))
                case SkippedRow(backend, label, reasons):
                    skipped = pytest.skip.Exception("; ".join(reasons))
                    yield _Untried.from_parent(self, name=f"{backend}::{label}", failure=skipped)
                case _:
                    earlier: dict[str, CheckResult] = {}
                    for check in checks_of(row.subject):
                        name = f"{row.candidate.name}::{row.label}::{check.name}"
                        yield _CheckItem.from_parent(self, name=name, check=check, row=row, earlier=earlier)


class _Item(pytest.Item):
    """A test that is not a function."""

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Shows what is wrong with the backend, without the kit's own traceback."""
        if isinstance(excinfo.value, ConformanceFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, self.nodeid


class _Untried(_Item):
    """A row that cannot be tried here, which is skipped, or a backend that cannot be imported, which fails."""

    def __init__(self, *, failure: BaseException, **node: Any) -> None:
        super().__init__(**node)
        self._failure = failure

    def runtest(self) -> NoReturn:
        raise self._failure


class _CheckItem(_Item):
    """One check of one row."""

    def __init__(self, *, check: Check, row: RowToTry, earlier: dict[str, CheckResult], **node: Any) -> None:
        super().__init__(**node)
        self._check = check
        self._row = row
        self._earlier = earlier
        """Results of the same row in this process, which may block this check."""

    def runtest(self) -> None:
        from sightline.testing.conformance.kit import Verdict, try_check
        from sightline.testing.conformance.samples import Samples
        from sightline.testing.conformance.trial import Effort

        effort = Effort.QUICK if self.config.option.conformance_quick else Effort.FULL
        subject = self._row.subject
        samples = Samples().for_problem(subject.problem)
        result = try_check(self._check, subject, effort, samples, self._earlier.values())
        self._earlier[result.check] = result
        match result.verdict:
            case Verdict.FAILED:
                lines = [f"{self.name} proves: {self._check.proves}", *result.lines(verbose=True)]
                raise ConformanceFailure("\n".join(lines))
            case Verdict.BLOCKED | Verdict.EXCUSED:
                pytest.skip(f"{result.verdict.value}: {result.detail}")
            case Verdict.PASSED:
                pass
