"""The example that asks a server."""

from __future__ import annotations

import runpy
import sys

import pytest

from support.pinned import ROOT
from support.serving import ServedProcess


def test_the_example_with_openais_client_prints_both_answers(
    server: ServedProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["server_client.py", "--url", server.base_url])
    runpy.run_path(str(ROOT / "examples" / "server_client.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "Paris" in said
    assert said.splitlines()[-1].endswith(" tokens")
