"""Kernels that are written in Python and compiled by Numba.

A kernel is written as a function that returns it: `make(*variant)`, where the variant is whole numbers that the code is
compiled for, such as the element of a buffer. Numba gives its LLVM text. From there on a kernel is compiled and kept as
all others are, not in Numba's own cache: that one knows a function by its own file only, and two processes that fill it
at once can exchange each other's kernels. Does not know what kernels compute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba

from sightline.kernels.cpu.compiler import ENTRY, CompiledKernel, load_kernel, sources_digest
from sightline.kernels.cpu.once import Once
from sightline.kernels.cpu.processor import Processor

SIGNATURE = numba.void(numba.int64, numba.int64, numba.int64)
SUMS = frozenset({"reassoc", "contract", "nsz"})
"""Freedoms of fp32 sums that vector code needs: any order, fused with products. NaN and infinity keep their meaning."""
_INNER_TYPES = ("ptr", "ptr", "i64", "i64", "i64")
"""The arguments of the function that Numba makes: where its result and its exception go, then ours."""

Make = Callable[..., Callable[[Any, Any, Any], None]]
"""Returns a kernel, given the variant."""


@Once
def compiled(make: Make, *variant: int) -> CompiledKernel:
    """The kernel of a variant: from this process, from the disk, or compiled."""
    name = make.__name__.removeprefix("make_")
    numbers = tuple(int(each) for each in variant)
    sources = sources_digest(Path(make.__code__.co_filename))
    identity = f"{numba.__version__} {sources} {make.__module__}.{make.__qualname__}{numbers}"
    return load_kernel(name, identity, partial(numba_text, make, numbers), Processor.detect())


def numba_text(make: Make, variant: tuple[int, ...]) -> str:
    """The LLVM text of a kernel, with `ENTRY` for its entry."""
    decorate = numba.cfunc(SIGNATURE, fastmath=set(SUMS), error_model="numpy")
    # Whole numbers, not members of an enumeration: Numba compiles for the value.
    callback = decorate(make(*variant))
    # Around the function itself there is one that raises its exceptions, which needs Python.
    inner = callback.native_name.removeprefix("cfunc.")
    module = llvm.parse_assembly(callback.inspect_llvm() + _ENTRY_TEXT.format(entry=ENTRY, inner=inner))
    found = tuple(str(each.type) for each in module.get_function(inner).arguments)
    if found != _INNER_TYPES:
        raise RuntimeError(f"expected a function of {_INNER_TYPES} from Numba {numba.__version__}, got {found}")
    for each in (*module.functions, *module.global_variables):
        if not each.is_declaration and each.name != ENTRY:
            each.linkage = llvm.Linkage.internal
    return str(module)


_ENTRY_TEXT = """
define void @{entry}(i64 %arguments, i64 %thread, i64 %num_threads) {{
  %result = alloca ptr
  %exception = alloca ptr
  %status = call i32 @{inner}(ptr %result, ptr %exception, i64 %arguments, i64 %thread, i64 %num_threads)
  ret void
}}
"""
"""The status is an exception's, of which kernels have one: a range whose step, the number of threads, is 0."""
