"""Downloads models from the Hugging Face hub into its usual cache, by ids of this form:

    owner/name[@revision][:file.gguf]

Owns the list of files that are fetched: configs, vocabularies, templates, and weights as safetensors or GGUF; never
pickles or code. Does not open the files. Only the operator names models: no request reaches this module.

A bare id that ends like a file of weights is refused, because it is probably a mistyped path.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sightline.core.errors import ModelError

_NAME = "[A-Za-z0-9][A-Za-z0-9._-]*"
_REFERENCE = re.compile(
    f"(?P<repository>{_NAME}/{_NAME})(?:@(?P<revision>{_NAME}(?:/{_NAME})*))?(?::(?P<file>{_NAME}(?:/{_NAME})*))?"
)

_PATTERNS = """
    config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json
    chat_template.json chat_template.jinja modules.json sentence_bert_config.json config_sentence_transformers.json
    *_Pooling/config.json *.safetensors *.safetensors.index.json
"""
CONFIGS = ("config.json", "generation_config.json")
FETCHED = tuple(_PATTERNS.split())
LEFT_OUT = ("*/*.safetensors", "*/*.safetensors.index.json", "consolidated*.safetensors")
"""Subfolders and Mistral's consolidated files hold the same weights in other formats."""
GGUF_SUFFIX = ".gguf"
_PICKLES = (".bin", ".pt", ".pth", ".pkl")
_WEIGHT_SUFFIXES = (GGUF_SUFFIX, ".safetensors", ".ckpt", *_PICKLES)
_MAX_LISTED = 40


@dataclass(frozen=True)
class HubReference:
    """A parsed Hugging Face id."""

    repository: str
    """owner/name."""
    revision: str | None = None
    """A branch, tag or commit; None for the main branch."""
    file: str | None = None
    """A GGUF file of the repository; None for the safetensors, or the only GGUF file."""

    def __str__(self) -> str:
        return f"{self.repository}{f'@{self.revision}' if self.revision else ''}{f':{self.file}' if self.file else ''}"


def parse_reference(text: str) -> HubReference | None:
    """Parses an id. Returns None if `text`, which is not an existing path, can only be a path.

    Raises `ModelError` for an id that is named like a file of weights: it could be either.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None or ".." in text:
        return None
    if match["file"] is not None and not match["file"].endswith(GGUF_SUFFIX):
        return None
    if match["repository"] == text and text.lower().endswith(_WEIGHT_SUFFIXES):
        raise ModelError(
            f"expected a folder, a .gguf file or a Hugging Face id, got {text!r}: read as a path, there is no such "
            "file; read as an id, its name is that of a file of weights. Check the path, or write "
            f"{text}@main if a Hugging Face model has this name."
        )
    return HubReference(match["repository"], match["revision"], match["file"])


def fetch(reference: HubReference) -> Path:
    """Downloads the model unless it is in the cache, and returns the folder or GGUF file.

    Shows a progress bar on a terminal. Raises `ModelError`, which says what was tried and what to do.
    """
    with _explained(reference), _bars_on_terminals_only():
        return _fetch(reference)


def fetch_description(reference: HubReference) -> Path:
    """Like `fetch`, for callers that read no weights: downloads configs alone, unless the model is a GGUF file."""
    if reference.file is None:
        with _explained(reference), _bars_on_terminals_only():
            folder = _snapshot(reference, CONFIGS)
            names = _weight_files(reference, folder, (".safetensors", GGUF_SUFFIX))
        is_gguf = bool(names) and all(name.endswith(GGUF_SUFFIX) for name in names)
        if (folder / CONFIGS[0]).is_file() and not is_gguf:
            return folder
    return fetch(reference)


def _fetch(reference: HubReference) -> Path:
    if reference.file is not None:
        return _fetch_file(reference, reference.file)
    folder = _snapshot(reference, FETCHED, LEFT_OUT)
    if any(folder.glob("*.safetensors")):
        return folder
    names = _weight_files(reference, folder)
    files = [name for name in names if name.endswith(GGUF_SUFFIX)]
    if len(files) == 1:
        return _fetch_file(reference, files[0])
    if files:
        raise ModelError(
            f"expected safetensors or one GGUF file in {reference}, got {len(files)} GGUF files. Choose one, for "
            f"example {reference}:{files[0]}, out of: {_listed(files)}"
        )
    found = f"only {names[0]}: it is a pickle, which is never fetched" if names else "neither"
    raise ModelError(
        f"expected *.safetensors or a .gguf file in {reference}, got {found}. Use a conversion of the model to "
        "safetensors or GGUF."
    )


def _snapshot(reference: HubReference, allowed: tuple[str, ...], ignored: tuple[str, ...] = ()) -> Path:
    # A late import: it would double the start-up time for local models.
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        reference.repository,
        revision=reference.revision,
        allow_patterns=list(allowed),
        ignore_patterns=list(ignored),
    )
    assert isinstance(folder, str)
    return Path(folder)


def _fetch_file(reference: HubReference, name: str) -> Path:
    """Downloads one file like a folder: with a progress bar, and from the cache if the hub cannot be reached."""
    folder = _snapshot(reference, (name,))
    if not (folder / name).is_file():
        files = [file for file in _weight_files(reference, folder) if file.endswith(GGUF_SUFFIX)]
        raise ModelError(
            f"expected the file {name!r} in {reference.repository}, got no such file. Its GGUF files: {_listed(files)}"
        )
    return folder / name


def _weight_files(
    reference: HubReference, folder: Path, suffixes: tuple[str, ...] = (GGUF_SUFFIX, *_PICKLES)
) -> list[str]:
    """The repository's files with these suffixes, or those of its cached part if the hub cannot be reached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    patterns = [f"*{suffix}" for suffix in suffixes]
    try:
        listed = snapshot_download(
            reference.repository, revision=reference.revision, allow_patterns=patterns, dry_run=True
        )
    except DryRunError:
        found = [path for pattern in patterns for path in folder.rglob(pattern)]
        return sorted(path.relative_to(folder).as_posix() for path in found)
    assert isinstance(listed, list)
    return sorted(info.filename for info in listed)


def _listed(files: list[str]) -> str:
    more = f" and {len(files) - _MAX_LISTED} more" if len(files) > _MAX_LISTED else ""
    return (", ".join(files[:_MAX_LISTED]) or "none") + more


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    # The operator's own setting for the hub's progress bars takes precedence.
    quiet = constants.HF_HUB_DISABLE_PROGRESS_BARS is None and not sys.stderr.isatty()
    if quiet:
        disable_progress_bars()
    try:
        yield
    finally:
        if quiet:
            enable_progress_bars()


@contextmanager
def _explained(reference: HubReference) -> Iterator[None]:
    from huggingface_hub.errors import EntryNotFoundError, HTTPError  # type: ignore[attr-defined]

    try:
        yield
    except (OSError, HTTPError, EntryNotFoundError, ValueError) as error:
        raise ModelError(_explanation(reference, error)) from error


def _explanation(reference: HubReference, error: Exception) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    expected = "expected a folder, a .gguf file or a Hugging Face id"
    if isinstance(error, GatedRepoError):
        return (
            f"expected access to {reference}, got a refusal: the model is gated. Accept its terms on its Hugging "
            "Face page, then set HF_TOKEN to a token of that account."
        )
    if isinstance(error, RevisionNotFoundError):
        return f"expected a revision of {reference.repository}, got {reference.revision!r}, which it does not have."
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{expected}, got {str(reference)!r}: there is no such path, and Hugging Face shows no such model. "
            "Check the spelling; for a private model set HF_TOKEN."
        )
    cache = constants.HF_HUB_CACHE
    if constants.HF_HUB_OFFLINE:
        return (
            f"{expected}, got {str(reference)!r}: there is no such path, it is not complete in the cache {cache}, and "
            "HF_HUB_OFFLINE forbids fetching it. Give a path, or unset HF_HUB_OFFLINE to fetch it."
        )
    reason = " ".join(str(error.__cause__ or error).split())[:200]
    return (
        f"{expected}, got {str(reference)!r}: there is no such path, it is not complete in the cache {cache}, and "
        f"fetching it failed ({reason}). Check the network, give a path, or set HF_HUB_OFFLINE=1 to use only the "
        "cache; a gated or private model needs HF_TOKEN."
    )
