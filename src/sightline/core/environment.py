"""All environment variables that Sightline reads, or sets for a library. A malformed value raises.

Does not know what is in the folders that it names.
"""

from __future__ import annotations

import os
from pathlib import Path

from sightline.core.errors import ConfigError


def api_keys() -> tuple[str, ...]:
    """API keys that a server accepts: the comma-separated list in `SIGHTLINE_API_KEY`.

    Not a command-line option, because process listings show those.
    """
    named = os.environ.get("SIGHTLINE_API_KEY")
    if named is None:
        return ()
    keys = tuple(named.split(","))
    if "" in keys:
        raise ConfigError(
            "expected keys with commas between them in SIGHTLINE_API_KEY, got an empty one; unset it for none"
        )
    return keys


def keep_ranks_local() -> None:
    """Lets NCCL connect over the loopback interface alone, unless the user names another one: all ranks are here."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def proof_folder() -> Path:
    """Folder of recorded proofs: `$XDG_CACHE_HOME/sightline/proofs`, otherwise under ~/.cache."""
    return _user_folder("XDG_CACHE_HOME", ".cache") / "sightline" / "proofs"


def kernel_folder() -> Path:
    """Folder of compiled CPU kernels: `$XDG_CACHE_HOME/sightline/kernels`, otherwise under ~/.cache."""
    return _user_folder("XDG_CACHE_HOME", ".cache") / "sightline" / "kernels"


def chat_history_file() -> Path:
    """What was typed in chats: `$XDG_STATE_HOME/sightline/chat_history`, otherwise under ~/.local/state."""
    return _user_folder("XDG_STATE_HOME", ".local/state") / "sightline" / "chat_history"


def _user_folder(variable: str, otherwise: str) -> Path:
    named = os.environ.get(variable, "")
    try:
        folder = Path(named) if named else Path.home() / otherwise
    except RuntimeError:
        raise ConfigError(
            f"expected a home folder, got a user without one; set HOME or {variable} to a folder"
        ) from None
    if not folder.is_absolute():
        raise ConfigError(f"expected an absolute path in {variable}, got {named!r}; set a full path, or unset it")
    return folder


def openai_api_key() -> str | None:
    """The API key that OpenAI clients send: `$OPENAI_API_KEY`, or None if it is unset or empty."""
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            "expected printable characters without spaces in OPENAI_API_KEY, got others; set the key alone, or unset it"
        )
    return key or None
