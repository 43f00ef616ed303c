"""Other engines, to be measured against. Imported only when one is asked for; none is a dependency.

The only module that may import transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sightline.core.errors import ConfigError
from sightline.tools.bench import Generate, Prompts


def transformers_engine(location: Path, dtype: torch.dtype) -> Generate:
    """Hugging Face transformers' `generate` on the same file."""
    from transformers import AutoModelForCausalLM

    source: dict[str, Any] = (
        {"pretrained_model_name_or_path": location}
        if location.is_dir()
        else {"pretrained_model_name_or_path": location.parent, "gguf_file": location.name}
    )
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype).eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: Prompts, count: int) -> list[tuple[int, ...]]:
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        generated = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
        return [tuple(row) for row in generated[:, longest:].tolist()]

    return generate


PEERS: Mapping[str, tuple[str, ...]] = {"transformers": ("transformers", "accelerate")}
"""By name: the packages that must be installed."""


def peer_engines(names: tuple[str, ...], location: Path, dtype: torch.dtype) -> dict[str, Generate]:
    """The named engines; one that is unknown or not installed is an error that says so."""
    engines: dict[str, Generate] = {}
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"expected engines to compare with out of {', '.join(PEERS)}, got {name!r}")
        missing = [package for package in PEERS[name] if find_spec(package) is None]
        if missing:
            raise ConfigError(f"expected {', '.join(missing)} to compare with {name}, got none: install it with pip")
        engines[name] = transformers_engine(location, dtype)
    return engines
