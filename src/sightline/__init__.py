"""Sightline: an LLM inference engine in which attention cannot be silently wrong.

`from sightline import LLM, SamplingParams`. Importing the package is cheap: torch and the rest come with the first name
that needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sightline.version import __version__

if TYPE_CHECKING:
    from sightline.async_llm import AsyncLLM
    from sightline.core.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from sightline.core.errors import SightlineError
    from sightline.core.request import CompletionOutput, Logprob, RequestOutput, SamplingParams, TextDelta
    from sightline.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "SightlineError",
    "TextDelta",
    "__version__",
]

_HOMES = {
    "LLM": "sightline.llm",
    "AsyncLLM": "sightline.async_llm",
    "BeamSearchOutput": "sightline.core.beams",
    "BeamSearchParams": "sightline.core.beams",
    "BeamSearchSequence": "sightline.core.beams",
    "CompletionOutput": "sightline.core.request",
    "Logprob": "sightline.core.request",
    "RequestOutput": "sightline.core.request",
    "SamplingParams": "sightline.core.request",
    "SightlineError": "sightline.core.errors",
    "TextDelta": "sightline.core.request",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'sightline' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
