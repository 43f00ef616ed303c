"""Writes one setting for each tuned kernel of fla-core's recurrent operations: `fla_settings.py FOLDER`.

With `FLA_CACHE_MODE=default FLA_CONFIG_DIR=FOLDER`, the library takes it instead of compiling and timing up to 24
settings for every number of heads, which would take a conformance kit an hour. It is one of those that the library
would try: the one with the fewest stages and the smallest tiles, which fits every device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

OPERATIONS = ("gated_delta_rule", "kda", "simple_gla")
_WARPS = 4


def tuned_kernels() -> dict[str, Any]:
    """The tuned kernels of all modules that the operations import, by name."""
    for name in OPERATIONS:
        import_module(f"fla.ops.{name}")
    tuner = import_module("fla.ops.utils.cache").CachedAutotuner
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("fla.ops.")]
    found = (each for module in modules for value in vars(module).values() for each in _wrapped(value))
    return {each.kernel_name: each for each in found if isinstance(each, tuner)}


def _wrapped(value: Any) -> Iterator[Any]:
    """A kernel, and what its decorators wrap."""
    while "fn" in getattr(value, "__dict__", {}):
        yield value
        value = value.fn


def setting(configs: list[Any]) -> dict[str, Any]:
    """The one of a kernel's settings that needs least, as the library stores it."""
    least = min(configs, key=lambda each: (each.num_stages, abs(each.num_warps - _WARPS), sum(each.kwargs.values())))
    return {
        "kwargs": least.kwargs,
        "num_warps": least.num_warps,
        "num_stages": least.num_stages,
        "num_ctas": 1,
    }


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kernels = tuned_kernels()
    for name, kernel in kernels.items():
        (folder / f"{name}.json").write_text(
            json.dumps({"kernel_name": name, "default_config": setting(kernel.configs)})
        )
    print(f"{len(kernels)} settings in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
