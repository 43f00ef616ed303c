"""The setting `speculative_config`: which drafter guesses, and how much. Imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields

from sightline.core.errors import ConfigError
from sightline.core.settings import check_settings, setting
from sightline.core.words import answer_unknown

METHODS = ("ngram",)
_PLANNED = ("draft_model", "eagle", "eagle3", "mtp", "frozen_kv_mtp", "medusa", "suffix")
"""Methods of other engines, which get a message of their own."""
MOST_DRAFTED = 64


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How the next tokens of a sequence are guessed. Named as in other engines."""

    method: str = setting("ngram", "What guesses: ngram, earlier text of the same sequence.")
    num_speculative_tokens: int = setting(7, "Most tokens that are guessed at once.", low=1, high=MOST_DRAFTED)
    model: str | None = setting(None, "The drafter, where it is a model of its own: a folder, a file or a hub id.")
    attention_backend: str | None = setting(None, "Attention backends of the drafter; those of the model by default.")
    prompt_lookup_max: int = setting(4, "Tokens at the end that earlier text should repeat.", low=1, high=32)
    prompt_lookup_min: int = setting(2, "Tokens at the end that earlier text must repeat.", low=1, high=32)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            is_known = ", which Sightline does not have yet" if self.method in _PLANNED else ""
            raise ConfigError(f"expected the speculative method {METHODS[0]}, got {self.method!r}{is_known}")
        check_settings(self, ConfigError)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"expected prompt_lookup_min of at most prompt_lookup_max {self.prompt_lookup_max}, got "
                f"{self.prompt_lookup_min}; lower it"
            )

    def __str__(self) -> str:
        return f"{self.method}, at most {self.num_speculative_tokens} tokens"


def read_speculation(given: str | Mapping[str, object] | None) -> Speculation | None:
    """The setting's value from JSON or a mapping; None if nothing is given. Raises `ConfigError` with what is wrong."""
    if given is None:
        return None
    values: object = given
    if isinstance(given, str):
        try:
            values = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"expected speculative_config as JSON, got {given!r}: {error}") from None
    if not isinstance(values, Mapping) or "method" not in values:
        raise ConfigError(
            f'expected speculative_config such as {{"method": "ngram", "num_speculative_tokens": 7}}, got {given!r}'
        )
    known = {each.name for each in fields(Speculation)}
    for name in values:
        if name not in known:
            raise ConfigError(answer_unknown(str(name), known, "a field of speculative_config", {}))
    return Speculation(**values)
