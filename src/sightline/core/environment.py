"""The environment variables that Sightline reads: all of them, and here alone. A malformed value raises.

Does not know what lies in the folders that it names.
"""

from __future__ import annotations

import os
from pathlib import Path

from sightline.core.errors import ConfigError


def api_keys() -> tuple[str, ...]:
    """Keys that a server accepts, from `SIGHTLINE_API_KEY`: one, or several with commas between them.

    On a command line they would be told to whoever lists the processes.
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


def proof_folder() -> Path:
    """Where passed runs of the conformance kit are kept: `$XDG_CACHE_HOME/sightline/proofs`, else under ~/.cache."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(named) if named else Path.home() / ".cache"
    if not cache.is_absolute():
        raise ConfigError(f"expected an absolute path in XDG_CACHE_HOME, got {named!r}; set a full path, or unset it")
    return cache / "sightline" / "proofs"


def openai_api_key() -> str | None:
    """The key that clients of OpenAI's protocol send: `$OPENAI_API_KEY`, None where it is not set or empty."""
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            "expected printable characters without spaces in OPENAI_API_KEY, got others; set the key alone, or unset it"
        )
    return key or None
