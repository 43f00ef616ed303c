"""Faults planted in the source of the compiled recurrent kernel, each caught by one step of the oracle's."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import pytest

from sightline.attention.backends.numba import recurrent_backend
from sightline.attention.backends.numba.recurrent_backend import NumbaRecurrentBackend
from sightline.kernels.cpu import recurrent
from support.case_marks import seldom
from support.cpu_launchers import SerialLauncher
from support.recurrent_cases import EVERYTHING, make_inputs
from support.recurrent_rig import StateCase, StateRig, StateStep, assert_step

pytestmark = pytest.mark.prove
MUTANTS = {
    "decay missed": ("exp32(load(decay, at * load64(arguments, 11) + i, 0))", "ONE"),
    "beta dropped": ("kept = beta * (given", "kept = (given"),
    "unit length dropped": ("    if UNIT:\n", "    if UNIT and False:\n"),
    "skip dropped": ("result + factor * given if skip != 0 else result", "result"),
    "key heads by modulo": ("places = (head // group * key_dim", "places = (head % (num_heads // group) * key_dim"),
    "slot 0 written": ("* size if slot != 0 else own", "* size if states != 0 else own"),
    "read slot written in place": ("        _write_state(source, target, ", "        _write_state(source, source, "),
    "tail of shared key heads not kept": ("0 if head % group == 0 else 2", "2"),
    "tail kept one token off": ("token + column - (W - 2)", "token + column - (W - 1)"),
    "state of another row": ("load64(read, row) * num_heads + head", "load64(read, 0) * num_heads + head"),
}


def check() -> None:
    rows = [StateCase(1), StateCase(9, frozenset({2})), StateCase(1)]
    step = StateStep(StateRig(NumbaRecurrentBackend, EVERYTHING, launcher=SerialLauncher(2)), rows, padding=(1, 1))
    assert_step(step, make_inputs(EVERYTHING, step.num_tokens), 2e-5)


def test_the_kernel_passes_the_check() -> None:
    check()


@pytest.mark.parametrize("name", seldom(MUTANTS, "state of another row"))
def test_the_check_catches_the_planted_fault(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = plant(*MUTANTS[name], tmp_path / "planted.py")
    monkeypatch.setattr(recurrent_backend, "make_recurrence", vars(planted)["make_recurrence"])
    with pytest.raises(AssertionError):
        check()


def plant(original: str, fault: str, path: Path) -> ModuleType:
    """The module with the fault, from a file: the compiler knows a kernel by the contents of its file."""
    source = inspect.getsource(recurrent)
    assert source.count(original) == 1
    path.write_text(source.replace(original, fault))
    spec = importlib.util.spec_from_file_location(f"planted_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
