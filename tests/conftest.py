"""One thread a test process: the tests' tensors are tiny, and the processes run side by side.

Without a GPU, Triton's kernels run in its interpreter, which must be chosen before anything imports triton. A shell
that runs the tests in the background has them, and every process that they start, ignore Ctrl-C: they must not.

`make test` runs what is not marked `prove`, and `make prove` what is: single tests, and all of the folders `PROOFS`.
"""

import os
import signal
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
PROOFS = (TESTS / "conformance", TESTS / "testing")
"""Tests of the tests: the kit, its mutants, the simulator and its planted bugs."""

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in PROOFS):
            item.add_marker(pytest.mark.prove)
