"""Compiles kernels to machine code, and keeps the result on disk.

    identity ──▶ file in the folder of compiled kernels? ── yes ──▶ loaded
                      └─ no ──▶ LLVM text ──▶ machine code ──▶ file, loaded

The name of a file is a digest of everything that the machine code depends on: the kernel's identity, which has a digest
of its sources, the processor and the version of LLVM. The text of a kernel that is kept is not written again. A file
that cannot be read, or is cut short, is compiled again. What is in a file runs in this process, so a folder that other
users can write is not used. Does not know how kernels are written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from sightline.core.environment import kernel_folder
from sightline.core.ledger import Ledger
from sightline.kernels.cpu.processor import Processor

ENTRY = "kernel"
"""The name of the function that a module must define: void(i64 arguments, i64 thread, i64 num_threads)."""
_DIGEST_BYTES = 32
_SHARED = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, eq=False)
class CompiledKernel:
    """Machine code of this process."""

    name: str
    address: int
    owner: object
    """Owns the machine code."""


def compile_kernel(
    name: str,
    variant: tuple[object, ...],
    write: Callable[[Any], None],
    processor: Processor,
    folder: Path | None = None,
) -> CompiledKernel:
    """Compiles the module that `write` fills, or loads it from the folder of compiled kernels.

    `variant` has all values that the module depends on, beside the processor. Their `repr` must tell them apart.
    """
    sources = sources_digest(Path(write.__code__.co_filename))
    target = f"{processor.triple} {processor.instructions.value}"
    identity = f"{llvmlite.__version__} {sources} {target} {variant!r}"
    return load_kernel(name, identity, partial(module_text, write, processor), processor, folder)


def load_kernel(
    name: str, identity: str, text: Callable[[], str], processor: Processor, folder: Path | None = None
) -> CompiledKernel:
    """Loads the kernel from the folder of compiled kernels, or compiles the LLVM text.

    Equal identities must have equal texts. A text is made only if it must be compiled.
    """
    folder = kernel_folder() if folder is None else folder
    version = ".".join(map(str, llvm.llvm_version_info))
    whole = "\n".join((version, processor.name, processor.features, identity))
    path = folder / f"{name}-{hashlib.sha256(whole.encode()).hexdigest()[:32]}.o"
    code = _stored(path)
    if code is None:
        code = machine_code(text(), processor)
        _keep(path, code)
    return _loaded(name, code, processor)


@cache
def sources_digest(source: Path) -> str:
    """A digest of the sources that a kernel in the file depends on: the file, this folder, and the folder above."""
    digest, here = hashlib.sha256(), Path(__file__).parent
    for each in (source, *sorted(here.glob("*.py")), *sorted(here.parent.glob("*.py"))):
        digest.update(each.read_bytes())
    return digest.hexdigest()


def module_text(write: Callable[[Any], None], processor: Processor) -> str:
    """The LLVM text of a kernel."""
    module = ir.Module(ENTRY)
    module.triple = processor.triple
    write(module)
    return str(module)


def machine_code(text: str, processor: Processor) -> bytes:
    """The object file of a module."""
    machine, module = _optimised(text, processor)
    code: bytes = machine.emit_object(module)
    return code


def assembly(text: str, processor: Processor) -> str:
    """The assembly of a module, for any architecture that LLVM was built with."""
    machine, module = _optimised(text, processor)
    listing: str = machine.emit_assembly(module)
    return listing


def optimise(module: Any, machine: Any) -> None:
    """Runs LLVM's passes for the target machine."""
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)


def target_machine(processor: Processor) -> Any:
    """LLVM's code generator for a processor."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(processor.triple)
    return target.create_target_machine(
        cpu=processor.name, features=processor.features, opt=3, reloc="pic", codemodel="jitdefault", jit=True
    )


def folder_refusal(folder: Path) -> str | None:
    """The reason why compiled kernels cannot be kept in the folder; None if they can."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return f"{folder} cannot be created: {error.strerror}"
    if not _is_trusted(folder.stat()):
        return f"{folder} belongs to another user, or others can write to it"
    return None if os.access(folder, os.W_OK) else f"{folder} is read-only"


def note_folder(ledger: Ledger) -> None:
    """Notes if compiled kernels cannot be kept, so that every start compiles them again."""
    refusal = folder_refusal(kernel_folder())
    if refusal is not None:
        ledger.note(
            "compiled kernels",
            f"those that are not kept yet are compiled at every start: {refusal}; set XDG_CACHE_HOME to a folder that "
            "only this user can write",
        )


def _optimised(text: str, processor: Processor) -> tuple[Any, Any]:
    machine = target_machine(processor)
    module = llvm.parse_assembly(text)
    module.verify()
    optimise(module, machine)
    return machine, module


def _loaded(name: str, code: bytes, processor: Processor) -> CompiledKernel:
    empty = llvm.parse_assembly("")
    empty.triple = processor.triple
    engine = llvm.create_mcjit_compiler(empty, target_machine(processor))
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return CompiledKernel(name, engine.get_function_address(ENTRY), engine)


def _is_trusted(status: os.stat_result) -> bool:
    """True if nobody but this user and root can have written what the status is of."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & _SHARED


def _stored(path: Path) -> bytes | None:
    """The machine code in the file, None if there is none, others can write it, or its digest does not fit."""
    try:
        if not _is_trusted(path.parent.stat()):
            return None
        with path.open("rb") as file:
            if not _is_trusted(os.fstat(file.fileno())):
                return None
            content = file.read()
    except OSError:
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _keep(path: Path, code: bytes) -> None:
    """Writes the file at once or not at all. A folder that cannot be written costs only the time to compile again."""
    if folder_refusal(path.parent) is not None:
        return
    with contextlib.suppress(OSError):
        handle, draft = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            Path(draft).replace(path)
        except OSError:
            Path(draft).unlink()
