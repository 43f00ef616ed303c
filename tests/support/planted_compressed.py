"""Backends of compressed attention whose source has a fault planted."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from sightline.attention.kinds import SpecKind
from support.compressed_bench import Backends

COMPRESSED, TORCH = "sightline.attention.compressed", "sightline.attention.backends.torch"
MODULES = (
    f"{COMPRESSED}.sums",
    f"{COMPRESSED}.layout",
    f"{COMPRESSED}.compressor",
    f"{COMPRESSED}.windows",
    f"{COMPRESSED}.tiles",
    f"{COMPRESSED}.entries",
    f"{COMPRESSED}.attend",
    f"{COMPRESSED}.step",
    f"{TORCH}.compressed_backend",
    f"{TORCH}.compressed_index_backend",
)
"""Each imports only modules before it."""
SUMS, LAYOUT, COMPRESSOR, WINDOWS, TILES, ENTRIES, ATTEND, STEP, BACKEND, INDEX = MODULES


def plant(module: str, original: str, planted: str) -> Backends:
    """The backends with another text in a module's source. All modules are loaded anew, so that they import the faulty
    one."""
    modules: dict[str, ModuleType] = {}
    with _restored():
        for name in MODULES:
            found = importlib.util.find_spec(name)
            assert found is not None
            assert found.origin is not None
            source = Path(found.origin).read_text()
            if name == module:
                assert source.count(original) == 1, f"expected {original!r} once in {name}"
                source = source.replace(original, planted)
            modules[name] = sys.modules[name] = importlib.util.module_from_spec(found)
            exec(compile(source, found.origin, "exec"), vars(modules[name]))
    return {
        SpecKind.COMPRESSED: vars(modules[BACKEND])["TorchCompressedBackend"],
        SpecKind.COMPRESSED_INDEX: vars(modules[INDEX])["TorchCompressedIndexBackend"],
    }


@contextmanager
def _restored() -> Iterator[None]:
    """Gives the modules of before back to others."""
    before = {name: importlib.import_module(name) for name in MODULES}
    try:
        yield
    finally:
        sys.modules.update(before)
