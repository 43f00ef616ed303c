"""Opens a model by its path or Hugging Face id, in any supported format."""

from __future__ import annotations

from pathlib import Path

from sightline.core.errors import CheckpointError
from sightline.core.ledger import Ledger
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.loading.config_only import ConfigCheckpoint
from sightline.models.loading.gguf.checkpoint import GgufCheckpoint
from sightline.models.loading.hub import fetch, fetch_description, parse_reference
from sightline.models.loading.renamed import with_standard_names
from sightline.models.loading.safetensors.folder import CONFIG_FILE, FolderCheckpoint
from sightline.models.loading.unstacked import with_separate_experts


def open_description(location: str | Path, ledger: Ledger) -> Checkpoint:
    """Like `open_checkpoint`, for callers that read no weights.

    A config.json is enough, in a folder or as a file. Of a Hugging Face id nothing else is fetched, unless the model is
    a GGUF file.
    """
    path = Path(location).expanduser()
    reference = parse_reference(location) if isinstance(location, str) and not path.exists() else None
    if reference is not None:
        path = fetch_description(reference)
    config = path / CONFIG_FILE
    if path.is_dir() and config.is_file() and not any(path.glob("*.safetensors")):
        path = config
    return ConfigCheckpoint(path) if path.is_file() and path.suffix == ".json" else open_checkpoint(path, ledger)


def open_checkpoint(location: str | Path, ledger: Ledger) -> Checkpoint:
    """Opens a Hugging Face folder, a `.gguf` file or a Hugging Face id. An existing path takes precedence over an id.

    Anything in the model's files that is ignored is recorded in `ledger`.
    """
    path = Path(location).expanduser()
    reference = parse_reference(location) if isinstance(location, str) and not path.exists() else None
    if reference is not None:
        path = fetch(reference)
    if path.is_dir():
        return with_separate_experts(with_standard_names(FolderCheckpoint(path, ledger)))
    if path.is_file() and path.suffix.lower() == ".gguf":
        return GgufCheckpoint(path, ledger)
    found = "no such path" if not path.exists() else "a file of another kind" if path.is_file() else "no file"
    raise CheckpointError(
        f"expected a folder with config.json and *.safetensors, a .gguf file, or a Hugging Face id "
        f"owner/name[@revision][:file.gguf], got {found}: {path}. Give the path of a model, or its id."
    )
