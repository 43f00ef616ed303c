"""Idle and slow clients cost normal ones little: a small form of `benchmarks/idle_and_slow_clients.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.attacks import ALPHA, BETA, KEYS
from support.serving import serving
from support.swift_model import save_swift_model

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "idle_and_slow_clients.py"
SMALL = {"idle": 150, "slow": 30, "clients": 4, "tokens": 400, "seconds": 5, "rounds": 1, "settle": 8}
ATTEMPTS = 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_normal_clients_have_nine_tenths_of_their_goodput_beside_idle_and_slow_ones(tmp_path: Path) -> None:
    flags = [str(save_swift_model(tmp_path)), "--served-model-name", "swift", "--cache-tokens", "512k"]
    options = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    with serving(*flags, environment=KEYS) as server:
        command = [sys.executable, str(SCRIPT), "--base-url", server.url, "--api-key", BETA, "--api-key", ALPHA]
        for _ in range(ATTEMPTS):
            done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
            print(done.stdout)
            if done.returncode == 0:
                break
        assert done.returncode == 0, done.stdout + done.stderr
        assert "0 idle" not in done.stdout.split("crowd: ")[1][:6]
