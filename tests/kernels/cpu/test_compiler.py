"""Machine code on disk: what is read, what is not trusted, and what a folder that cannot be used costs."""

from __future__ import annotations

import errno
import importlib.util
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch

from sightline.core.ledger import Ledger
from sightline.kernels.cpu import attend, compiler, norms, pointwise, team
from sightline.kernels.cpu.attend_kernel import attend_kernel, merge_kernel
from sightline.kernels.cpu.attend_prompt import attend_prompt_kernel
from sightline.kernels.cpu.attend_tiles import AttendForm
from sightline.kernels.cpu.block_kernel import product_kernel
from sightline.kernels.cpu.compiled import Make, compiled, numba_text
from sightline.kernels.cpu.compiler import (
    CompiledKernel,
    compile_kernel,
    folder_refusal,
    load_kernel,
    note_folder,
    optimise,
    target_machine,
)
from sightline.kernels.cpu.dense_kernel import DenseTypes, dense_kernel
from sightline.kernels.cpu.input_blocks import quantise_kernel, write_quantise
from sightline.kernels.cpu.instructions import load64, store64
from sightline.kernels.cpu.lookup_kernel import lookup_kernel
from sightline.kernels.cpu.processor import Processor
from sightline.kernels.cpu.record import ENTRY_POINT
from support.coded_weights import FORMS

NUMBER = 5


def make_add(number: int) -> Callable[[Any, Any, Any], None]:
    """Adds the number to the one at the address."""

    def add(address: Any, thread: Any, num_threads: Any) -> None:
        for index in range(thread, 1, num_threads):
            store64(address, index, load64(address, index) + number)

    return add


class Texts:
    """Gives the LLVM text of a kernel, and counts how often it was asked to."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> str:
        self.count += 1
        return numba_text(make_add, (NUMBER,))


@pytest.fixture
def texts() -> Texts:
    return Texts()


def load(texts: Texts, folder: Path) -> CompiledKernel:
    return load_kernel("add", f"add {NUMBER}", texts, Processor.detect(), folder)


def added(kernel: CompiledKernel) -> int:
    number = np.zeros(1, dtype=np.int64)
    ENTRY_POINT(kernel.address)(number.ctypes.data, 0, 1)
    return int(number[0])


def test_a_kernel_is_compiled_once_and_then_loaded(tmp_path: Path, texts: Texts) -> None:
    assert [added(load(texts, tmp_path / "new")) for _ in range(3)] == [NUMBER] * 3
    assert texts.count == 1


def test_the_text_of_a_kernel_that_is_kept_is_not_written(tmp_path: Path) -> None:
    written = []

    def write(module: Any) -> None:
        written.append(module)
        write_quantise(module, torch.float32, Processor.detect())

    for _ in range(2):
        assert compile_kernel("quantise", (1,), write, Processor.detect(), tmp_path).address
    assert len(written) == 1
    compile_kernel("quantise", (2,), write, Processor.detect(), tmp_path)
    assert len(written) == 2


def test_every_kernel_has_its_own_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was kept under another one's name would be run in its place."""
    found = []

    def load(name: str, identity: str, text: object, processor: Processor, _: object) -> CompiledKernel:
        found.append((name, identity, processor.name, processor.features))
        return CompiledKernel(name, 0, None)

    monkeypatch.setattr(compiler, "load_kernel", load)
    this = Processor.detect()
    for processor, dtype in product((this, this.portable()), (torch.float32, torch.bfloat16)):
        quantise_kernel.make(dtype, processor)
        for form in FORMS.values():
            product_kernel.make(form, dtype, processor)
            lookup_kernel.make(form, dtype, processor)
        for many_rows in (False, True):
            dense_kernel.make(DenseTypes(dtype, dtype, torch.float32), processor, many_rows=many_rows)
        for group, dim in ((1, 8), (2, 8), (1, 16)):
            for kernel in (attend_kernel, attend_prompt_kernel, merge_kernel):
                kernel.make(AttendForm(torch.float32, dtype, torch.float32, group, dim, dim), processor)
    assert len(set(found)) == len(found) == 2 * 2 * (1 + 2 * len(FORMS) + 2 + 3 * 3)


def test_variants_of_a_kernel_are_kept_apart() -> None:
    assert [added(compiled(make_add, number)) for number in (1, 2, 1)] == [1, 2, 1]


def test_another_processor_gets_code_of_its_own(tmp_path: Path, texts: Texts) -> None:
    mine = Processor.detect()
    for each in (mine, replace(mine, features=""), replace(mine, name="generic")):
        assert added(load_kernel("add", "add", texts, each, tmp_path)) == NUMBER
    assert (texts.count, len(list(tmp_path.iterdir()))) == (3, 3)


def test_a_kernel_whose_source_changed_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = Path(__file__).read_text()
    found = []
    for name, text in (("first", source), ("second", source.replace(") + number)", ") + number + 1)"))):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "changed_kernels.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location("changed_kernels", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.append(added(compiled(module.make_add, NUMBER)))
    assert found == [NUMBER, NUMBER + 1]


@pytest.mark.parametrize(
    "damage", [lambda code: b"", lambda code: code[:-1], lambda code: code[:40] + b"?" + code[41:]]
)
def test_a_damaged_file_is_compiled_again(tmp_path: Path, texts: Texts, damage: Callable[[bytes], bytes]) -> None:
    load(texts, tmp_path)
    [file] = tmp_path.iterdir()
    good = file.read_bytes()
    file.write_bytes(damage(good))
    assert added(load(texts, tmp_path)) == NUMBER
    assert texts.count == 2
    assert file.read_bytes() == good


def test_code_that_others_could_have_written_is_not_run(tmp_path: Path, texts: Texts) -> None:
    load(texts, tmp_path)
    [file] = tmp_path.iterdir()
    file.chmod(0o666)
    assert added(load(texts, tmp_path)) == NUMBER
    tmp_path.chmod(0o777)
    assert added(load(texts, tmp_path)) == NUMBER
    assert texts.count == 3


def test_code_of_another_user_is_not_run(tmp_path: Path, texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    load(texts, tmp_path)
    other = max(os.geteuid(), 1)
    os.chown(tmp_path, other, -1)
    monkeypatch.setattr(os, "geteuid", lambda: other + 1)
    assert added(load(texts, tmp_path)) == NUMBER
    assert texts.count == 2
    assert "another user" in str(folder_refusal(tmp_path))


def test_a_folder_that_cannot_be_created_costs_only_time(tmp_path: Path, texts: Texts) -> None:
    file = tmp_path / "file"
    file.touch()
    assert [added(load(texts, file / "kernels")) for _ in range(2)] == [NUMBER] * 2
    assert texts.count == 2
    assert "cannot be created" in str(folder_refusal(file / "kernels"))


def test_a_full_disk_costs_only_time_and_leaves_no_draft(
    tmp_path: Path, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "replace", fail)
    assert added(load(texts, tmp_path)) == NUMBER
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(tempfile, "mkstemp", fail)
    assert added(load(texts, tmp_path)) == NUMBER


def test_a_new_folder_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert folder_refusal(tmp_path / "kernels") is None
    finally:
        os.umask(before)
    assert (tmp_path / "kernels").stat().st_mode & 0o777 == 0o700


def test_the_ledger_says_that_kernels_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(strict=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    note_folder(ledger)
    assert list(ledger) == []
    (tmp_path / "sightline/kernels").chmod(0o777)
    note_folder(ledger)
    [note] = ledger.notes
    assert "others can write to it" in note.fact


@pytest.mark.parametrize(
    ("make", "variant"),
    [
        (make_add, (1,)),
        (pointwise.make_take_rows, (0, 0)),
        (pointwise.make_gate, (1, 1)),
        (norms.make_rotary_table, (0,)),
        (attend.make_locate, ()),
        (attend.make_write, (0, 0)),
        (team.make_run, ()),
        (team.make_work, ()),
    ],
)
def test_kernels_need_nothing_of_python(make: Make, variant: tuple[int, ...]) -> None:
    """An exception in a thread of a team would wait for Python's lock; a missing symbol would end the process."""
    module = llvm.parse_assembly(numba_text(make, variant))
    optimise(module, target_machine(Processor.detect()))
    declared = [each.name for each in (*module.functions, *module.global_variables) if each.is_declaration]
    outside = [name for name in declared if not name.startswith(("llvm.", "pthread_"))]
    assert set(outside) <= {"erff", "sched_yield"}
