"""The setting `speculative_config`: which drafter guesses, and how much. Imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields

from sightline.core.errors import ConfigError
from sightline.core.extensions import extensions
from sightline.core.settings import check_settings, setting, stated
from sightline.core.words import answer_unknown

ENTRY_POINT_GROUP = "sightline.drafters"
MOST_DRAFTED = 64
MOST_BRANCHES = 8
MOST_CORPUS_TOKENS = 1 << 20
LEAST_CORPUS_TOKENS = 64
"""What a text counts for at least, so that short texts of many callers are bounded too."""
_SHARED = frozenset({"method", "num_speculative_tokens", "draft_tensor_parallel_size"})
"""Settings that every method takes."""


@dataclass(frozen=True)
class DraftMethod:
    """A way to guess tokens: its name in `speculative_config`, and the settings that it takes there."""

    name: str
    help: str
    """A phrase that says what it guesses from."""
    takes: frozenset[str] = frozenset()
    """Settings that this method takes, beside those that every method takes."""
    needs: frozenset[str] = frozenset()
    """Settings that must be given."""

    def check(self, given: Speculation) -> None:
        """Raises `ConfigError` if a setting is missing, or if one has a value that this method would ignore."""
        for name, each in stated(Speculation).items():
            value = vars(given)[name]
            if name in self.needs and value is None:
                raise ConfigError(
                    f"expected {name} in speculative_config with the method {self.name}, got none; give it: {each.help}"
                )
            if name not in self.takes | self.needs | _SHARED and value != each.default:
                raise ConfigError(
                    f"expected no {name} in speculative_config with the method {self.name}, which has no use for it, "
                    f"got {value!r}; leave it out"
                )


NGRAM = DraftMethod(
    "ngram",
    "earlier text of the same sequence, and with corpus_tokens of earlier requests",
    takes=frozenset({"prompt_lookup_max", "prompt_lookup_min", "corpus_tokens", "num_branches"}),
)
DRAFT_MODEL = DraftMethod(
    "draft_model",
    "a smaller model with the same tokens",
    takes=frozenset({"attention_backend"}),
    needs=frozenset({"model"}),
)
EAGLE3 = DraftMethod(
    "eagle3",
    "a small head that continues the model's states",
    takes=frozenset({"attention_backend"}),
    needs=frozenset({"model"}),
)
MTP = DraftMethod("mtp", "the model's own layers for multi-token prediction", takes=frozenset({"attention_backend"}))
FROZEN_KV_MTP = DraftMethod(
    "frozen_kv_mtp",
    "a small network that reads the model's cache and has none",
    takes=frozenset({"attention_backend"}),
    needs=frozenset({"model"}),
)
METHODS = (NGRAM, DRAFT_MODEL, EAGLE3, MTP, FROZEN_KV_MTP)
"""Sightline's own methods. Packages bring others, see `method_names`."""
_PLANNED = ("eagle", "medusa", "suffix")
"""Methods of other engines, which get a message of their own."""


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How the next tokens of a sequence are guessed. Named as in other engines."""

    method: str = setting(
        "ngram",
        f"What guesses: {'; '.join(f'{each.name}, {each.help}' for each in METHODS)}; or a drafter of an installed "
        "package.",
    )
    num_speculative_tokens: int = setting(7, "Most tokens that are guessed at once.", low=1, high=MOST_DRAFTED)
    num_branches: int = setting(
        1, "Continuations that are guessed at once, as a tree; 1 guesses one.", low=1, high=MOST_BRANCHES
    )
    prompt_lookup_max: int = setting(4, "Tokens at the end that earlier text should repeat.", low=1, high=32)
    prompt_lookup_min: int = setting(2, "Tokens at the end that earlier text must repeat.", low=1, high=32)
    corpus_tokens: int = setting(
        0,
        "Tokens of earlier prompts and answers of the same caller that are kept to guess from; 0 keeps none. Each "
        "takes 20 to 32 bytes of the host's memory.",
        low=0,
        high=MOST_CORPUS_TOKENS,
    )
    model: str | None = setting(None, "A folder or a Hugging Face id of the network that guesses.")
    attention_backend: str | None = setting(
        None, "Attention backend of the network that guesses; that of the model without it."
    )
    draft_tensor_parallel_size: int = setting(
        1, "Devices that share the network that guesses; only 1 is supported yet.", low=1
    )

    def __post_init__(self) -> None:
        check_settings(self, ConfigError)
        own = {each.name: each for each in METHODS}.get(self.method)
        if own is not None:
            own.check(self)
        elif self.method not in (names := method_names()):
            is_known = ", which Sightline does not have yet" if self.method in _PLANNED else ""
            raise ConfigError(f"expected a speculative method out of {', '.join(names)}, got {self.method!r}{is_known}")
        if self.draft_tensor_parallel_size != 1:
            raise ConfigError(
                f"expected draft_tensor_parallel_size 1, got {self.draft_tensor_parallel_size}: more is not supported "
                "yet"
            )
        if 0 < self.corpus_tokens < LEAST_CORPUS_TOKENS:
            raise ConfigError(
                f"expected corpus_tokens 0, or at least {LEAST_CORPUS_TOKENS}, which the shortest text counts for, got "
                f"{self.corpus_tokens}"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"expected prompt_lookup_min of at most prompt_lookup_max {self.prompt_lookup_max}, got "
                f"{self.prompt_lookup_min}; lower it"
            )

    @property
    def network(self) -> str:
        """`model`, for a method that needs one. Raises `ConfigError` if it is not given."""
        if self.model is None:
            raise ConfigError(f"expected model in speculative_config with the method {self.method}, got none; give it")
        return self.model

    def __str__(self) -> str:
        branches = f" in each of {self.num_branches} branches" if self.num_branches > 1 else ""
        return f"{self.method}, at most {self.num_speculative_tokens} tokens{branches}"


def method_names() -> tuple[str, ...]:
    """The names of all methods that are installed. Imports none of their packages."""
    owners = dict.fromkeys((each.name for each in METHODS), "sightline")
    return (*owners, *(each.name for each in extensions(ENTRY_POINT_GROUP, "drafter", owners)))


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
