"""The soak test tells of requests that never end and of metrics that are not there, instead of passing or waiting."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from sightline.core.errors import SightlineError

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "soak.py"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = spec_from_file_location("soak", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # Dataclasses look up their module by its name.
    monkeypatch.setitem(sys.modules, "soak", module)
    spec.loader.exec_module(module)
    return module


class FakeResponse:
    status = 200

    def __init__(self, body: bytes | None) -> None:
        self._body = body

    async def read(self) -> bytes:
        assert self._body is not None
        return self._body

    async def read_some(self) -> bytes:
        await asyncio.Event().wait()
        return b""


class FakeClient:
    """A server that answers with `body`, or never ends its answer without one."""

    def __init__(self, body: bytes | None) -> None:
        self._body = body

    @asynccontextmanager
    async def exchange(self, *_: object) -> AsyncIterator[FakeResponse]:
        yield FakeResponse(self._body)


@pytest.mark.parametrize(
    ("cancelled", "told"), [(0.0, ["expected an answer of"]), (1.0, [])], ids=["lost", "cancelled"]
)
def test_a_request_that_never_ends_is_told_unless_the_client_cancels_it(
    soak: Any, monkeypatch: pytest.MonkeyPatch, cancelled: float, told: list[str]
) -> None:
    monkeypatch.setattr(soak, "LOST_SECONDS", 0.05)
    run = soak.Soak(FakeClient(None), soak.Load(1.0, 1, cancelled, 4, 4), "model", 100)
    asyncio.run(asyncio.wait_for(run._client_of(0, time.monotonic() + 0.01), 10.0))
    assert [each[: len(told[0])] for each in run.wrong] == told
    assert run.ends["cancelled"] == int(cancelled)


def test_a_metric_that_is_not_there_is_not_taken_for_0(soak: Any) -> None:
    names = [*soak.HELD, *soak.COUNTED]
    text = "".join(f'sightline_{name}{{engine="0"}} {number}\n' for number, name in enumerate(names))
    found = asyncio.run(soak.read_metrics(FakeClient(text.encode())))
    assert found == {name: float(number) for number, name in enumerate(names)}
    with pytest.raises(SightlineError, match="num_requests_paused"):
        asyncio.run(soak.read_metrics(FakeClient(text.replace("paused", "resting").encode())))


def test_descendants_count_whatever_their_numbers(soak: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Process numbers begin anew when they run out, so a child may have a lower one."""
    for process, parent, pages in [(900, 1, 256), (20, 900, 512), (10, 20, 1024), (30, 1, 4096)]:
        folder = tmp_path / str(process)
        folder.mkdir()
        (folder / "statm").write_text(f"9999 {pages} 0")
        (folder / "stat").write_text(f"{process} (a (name)) S {parent} 0")
    monkeypatch.setattr(soak, "Path", lambda _: tmp_path)
    assert soak.resident_mib(900) == (256 + 512 + 1024) * os.sysconf("SC_PAGE_SIZE") >> 20


def test_a_run_too_short_to_judge_memory_is_refused() -> None:
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--seconds", "3"], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 2
    assert "expected --seconds of at least 16" in run.stderr
