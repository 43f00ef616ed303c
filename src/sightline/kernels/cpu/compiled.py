"""Compiles kernels with Numba, and keeps the machine code on disk.

A kernel is written as a function that returns it: `make(*variant)`, where the variant is whole numbers that the code is
compiled for, such as the element of a buffer. Numba's cache knows a function by its own file and the processor, not
by the files that it calls, so the folder is named after all files here. Does not know what kernels compute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding

from sightline.core.environment import kernel_folder
from sightline.version import __version__

SIGNATURE = numba.void(numba.int64, numba.int64, numba.int64)
SUMS = frozenset({"reassoc", "contract", "nsz"})
"""What vector code needs of sums: any order, fused with products. NaN and infinity stay what they are."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """Compiled code."""

    name: str
    address: int
    owner: object
    """Keeps the code in memory."""


@cache
def compiled(make: Callable[..., Callable[[Any, Any, Any], None]], *variant: int) -> Kernel:
    """The kernel of a variant: from this process, from the disk, or compiled."""
    decorate = numba.cfunc(SIGNATURE, cache=_caches(), fastmath=set(SUMS), error_model="numpy")
    with _cached_here():
        # Whole numbers, not members of an enumeration: Numba compiles for the value, and names the file by it.
        owner = decorate(make(*[int(each) for each in variant]))
    return Kernel(make.__name__.removeprefix("make_"), owner.address, owner)


@cache
def compiled_function(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """A function without Python that Python calls. It runs without the interpreter's lock."""
    with _cached_here():
        decorated: Callable[..., Any] = numba.njit(signature, cache=_caches(), nogil=True, error_model="numpy")(
            function
        )
    return decorated


@contextmanager
def _cached_here() -> Iterator[None]:
    """Numba reads the folder from its own settings, which are the process's: they are restored."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(code_folder())
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


@cache
def code_folder() -> Path:
    """Where machine code for this processor, this version and these sources is kept."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    features = binding.get_host_cpu_features().flatten()
    digest.update(f"{numba.__version__} {binding.get_host_cpu_name()} {features}".encode())
    return kernel_folder() / f"{__version__}-{binding.get_host_cpu_name()}-{digest.hexdigest()[:16]}"


@cache
def _caches() -> bool:
    """False if nothing can be kept on disk: kernels are then compiled by every process."""
    try:
        code_folder().mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return True


def is_cold() -> bool:
    """True if no kernel was kept on disk yet, so that the next ones take long."""
    return not (_caches() and any(code_folder().iterdir()))
