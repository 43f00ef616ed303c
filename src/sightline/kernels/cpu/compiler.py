"""Compiles kernels to machine code, and keeps the result on disk.

The name of a cached file is a digest of everything that the machine code depends on: the kernel's LLVM text, the
processor and the version of LLVM. A file that cannot be read, or is cut short, is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from sightline.core.environment import kernel_folder
from sightline.kernels.cpu.processor import Processor

ENTRY = "kernel"
"""The name of the function that a module must define: void(i64 arguments, i64 thread, i64 num_threads)."""
_DIGEST_BYTES = 32


@dataclass(frozen=True, eq=False)
class CompiledKernel:
    """Machine code of this process."""

    name: str
    address: int
    owner: object
    """Owns the machine code."""


def compile_kernel(
    name: str, write: Callable[[Any], None], processor: Processor, folder: Path | None = None
) -> CompiledKernel:
    """Compiles the module that `write` fills, or loads it from the folder of compiled kernels."""
    text = module_text(write, processor)
    folder = kernel_folder() if folder is None else folder
    version = ".".join(map(str, llvm.llvm_version_info))
    identity = "\n".join((version, processor.name, processor.features, text))
    path = folder / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.o"
    code = _stored(path)
    if code is None:
        code = machine_code(text, processor)
        _keep(path, code)
    return _loaded(name, code, processor)


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


def _optimised(text: str, processor: Processor) -> tuple[Any, Any]:
    machine = _target_machine(processor)
    module = llvm.parse_assembly(text)
    module.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    return machine, module


def _target_machine(processor: Processor) -> Any:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(processor.triple)
    return target.create_target_machine(
        cpu=processor.name, features=processor.features, opt=3, reloc="pic", codemodel="jitdefault", jit=True
    )


def _loaded(name: str, code: bytes, processor: Processor) -> CompiledKernel:
    empty = llvm.parse_assembly("")
    empty.triple = processor.triple
    engine = llvm.create_mcjit_compiler(empty, _target_machine(processor))
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return CompiledKernel(name, engine.get_function_address(ENTRY), engine)


def _stored(path: Path) -> bytes | None:
    """The machine code in the file, None if there is none or its digest does not fit."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _keep(path: Path, code: bytes) -> None:
    """Writes the file at once or not at all. A folder that cannot be written costs only the time to compile again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        Path(draft).replace(path)
