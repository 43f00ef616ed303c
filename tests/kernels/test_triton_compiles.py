"""Every kernel compiles for SM90: the interpreter, which the other tests use, accepts what the compiler refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import sightline.kernels.triton
from support.processes import with_support

pytest.importorskip("triton")
KERNELS = Path(next(iter(sightline.kernels.triton.__path__)))


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize("flags", [[], pytest.param(["--machine-code"], marks=pytest.mark.slow)], ids=["", "whole"])
def test_every_kernel_compiles_for_sm90(tmp_path: Path, flags: list[str]) -> None:
    environment = with_support("TRITON_INTERPRET") | {"TRITON_CACHE_DIR": str(tmp_path)}
    if not flags:
        environment["DISABLE_LLVM_OPT"] = "1"  # optimising takes half of the time and refuses nothing
    command = [sys.executable, "-m", "support.sm90_launches", *flags]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert set(run.stdout.split()) == launched_kernels()


def launched_kernels() -> set[str]:
    """Names that stand before a grid."""
    return {name for file in KERNELS.glob("*.py") for name in re.findall(r"(\w+)\[\(", file.read_text("utf-8"))}
