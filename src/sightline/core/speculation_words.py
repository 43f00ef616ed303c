"""Names that SGLang and earlier versions of vLLM have for fields of `speculative_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from sightline.core.errors import ConfigError

ReadFields: TypeAlias = Callable[[Any], Mapping[str, object]]
"""The fields that a value stands for. Their own checks refuse a value that is not of their type."""
ALGORITHMS: Mapping[str, str] = MappingProxyType(
    {"NGRAM": "ngram", "STANDALONE": "draft_model", "EAGLE": "eagle", "EAGLE3": "eagle3", "NEXTN": "mtp", "MTP": "mtp"}
)
"""SGLang's algorithms, and the methods that they are."""
_NGRAM_MODEL = "[ngram]"
"""What earlier versions of vLLM take for a model that guesses from earlier text."""


def the_field(name: str) -> ReadFields:
    """Reads a value as that of one field."""
    return lambda value: {name: value}


def algorithm(value: object) -> Mapping[str, object]:
    """SGLang's `speculative_algorithm`."""
    method = ALGORITHMS.get(str(value).upper())
    if method is None:
        raise ConfigError(f"expected speculative_algorithm out of {', '.join(ALGORITHMS)}, got {value!r}")
    return {"method": method}


def draft_tokens(value: object) -> Mapping[str, object]:
    """SGLang's `speculative_num_draft_tokens`, which counts the last known token with the guesses behind it."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
        raise ConfigError(
            f"expected speculative_num_draft_tokens of at least 2, the last known token and one guess, got {value!r}"
        )
    return {"num_speculative_tokens": value - 1}


def branches(value: object) -> Mapping[str, object]:
    """SGLang's `speculative_eagle_topk`: a chain of guesses is 1."""
    if value != 1:
        raise ConfigError(
            f"expected speculative_eagle_topk 1, got {value!r}: several guesses for one place are not supported yet"
        )
    return {}


def draft_model(value: object) -> Mapping[str, object]:
    """vLLM's `speculative_model`, which says the method too."""
    return {"method": "ngram"} if value == _NGRAM_MODEL else {"method": "draft_model", "model": value}
