"""The way in: from a path to a `Checkpoint`.

Owns the choice of format. Does not know any format.
"""

from __future__ import annotations

from pathlib import Path

from sightline.core.errors import CheckpointError
from sightline.core.ledger import Ledger
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.loading.folder import FolderCheckpoint
from sightline.models.loading.gguf_checkpoint import GgufCheckpoint


def open_checkpoint(location: str | Path, ledger: Ledger) -> Checkpoint:
    """Opens a Hugging Face folder or a `.gguf` file; what is ignored of it is recorded in `ledger`."""
    path = Path(location).expanduser()
    if path.is_dir():
        return FolderCheckpoint(path, ledger)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return GgufCheckpoint(path, ledger)
    found = "no such path" if not path.exists() else "a file of another kind" if path.is_file() else "no file"
    raise CheckpointError(
        f"expected a folder with config.json and *.safetensors, or a .gguf file, got {found}: {path}. "
        "Give the path of a model on this machine: nothing is fetched."
    )
