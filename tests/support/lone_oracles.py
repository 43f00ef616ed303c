"""transformers as an oracle: it computes recurrent layers itself, not with the library that is tested against it."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec

_LIBRARIES = ("fla", "causal_conv1d", "mamba_ssm")
"""What transformers computes with where it is installed, also on a CPU, for which these have no kernels."""


def import_oracles_alone() -> None:
    """Imports the models of transformers that have recurrent layers as if no such library were installed."""
    hidden = [name for name in _LIBRARIES if name not in sys.modules and find_spec(name)]
    if not hidden:
        return
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        # Remembers that the library is not there.
        import_module("transformers.utils.import_utils").is_flash_linear_attention_available()
        import_module("support.hybrids")
        with suppress(ImportError):
            import_module("transformers.models.bailing_hybrid.modeling_bailing_hybrid")
    finally:
        for name in hidden:
            del sys.modules[name]
