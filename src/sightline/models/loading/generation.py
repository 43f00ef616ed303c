"""Reading of a model's generation_config.json.

Owns the rule that a field which would change the output is honoured or recorded, never dropped. Does not know
requests, whose parameters take precedence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from sightline.core.errors import CheckpointError
from sightline.core.ledger import Ledger
from sightline.core.request import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY

_HONOURED = frozenset(
    ("eos_token_id", "do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_new_tokens")
)

_NAMES = """
    transformers_version _from_model_config _commit_hash bos_token_id pad_token_id decoder_start_token_id
    cache_implementation cache_config use_cache return_dict_in_generate output_attentions output_hidden_states
    output_scores output_logits max_length max_new_tokens max_time return_legacy_cache disable_compile compile_config
    low_memory prefill_chunk_size trust_remote_code chat_format
"""
_INFORMATIONAL = frozenset(_NAMES.split())
"""Fields that do not change which tokens come out, or only bound how many. The engine has its own bound."""

_NEUTRAL_AT_ONE = """
    encoder_repetition_penalty length_penalty num_beams num_beam_groups num_return_sequences typical_p guidance_scale
"""
_NEUTRAL_AT_ZERO = """
    diversity_penalty epsilon_cutoff eta_cutoff no_repeat_ngram_size encoder_no_repeat_ngram_size min_length
    early_stopping renormalize_logits remove_invalid_values token_healing is_assistant
"""
_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    dict.fromkeys(_NEUTRAL_AT_ONE.split(), (1,)) | dict.fromkeys(_NEUTRAL_AT_ZERO.split(), (0,))
)
"""The values under which a field does nothing.

None and an empty list are neutral for every field. A field that is in no table here and not neutral is recorded.
"""

_ASSISTED = ("assistant_", "num_assistant_tokens", "prompt_lookup_", "max_matching_ngram_size", "target_lookbehind")
"""Prefixes of settings for assisted decoding, which does not change the distribution."""


@dataclass(frozen=True)
class GenerationDefaults:
    """The settings that the model's authors recommend; None for those they do not set."""

    eos_token_ids: frozenset[int]
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 keeps every token."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    """Called `min_new_tokens` in transformers."""

    def with_temperature(self, temperature: float) -> GenerationDefaults:
        """The same, with a temperature if the model's authors say nothing about sampling."""
        is_told = self.do_sample is not None or self.temperature is not None
        return self if is_told else replace(self, temperature=temperature)


def read_generation_defaults(
    generation_config: Mapping[str, object],
    model_config: Mapping[str, object],
    tokenizer_eos: Callable[[], frozenset[int]],
    ledger: Ledger,
) -> GenerationDefaults:
    """The defaults of a Hugging Face folder. `tokenizer_eos` is called only if neither config names an end token."""
    _record_ignored(generation_config, ledger)
    eos_token_ids = _token_ids(generation_config) or _token_ids(model_config) or tokenizer_eos()
    return GenerationDefaults(
        eos_token_ids=eos_token_ids,
        do_sample=_flag(generation_config, "do_sample"),
        temperature=_number(generation_config, "temperature", "from 0 to 10000", lambda value: 0 <= value <= 1e4),
        top_p=_number(generation_config, "top_p", "above 0 and at most 1", lambda value: 0 < value <= 1),
        top_k=_top_k(generation_config),
        min_p=_number(generation_config, "min_p", "from 0 to 1", lambda value: 0 <= value <= 1),
        repetition_penalty=_number(
            generation_config,
            "repetition_penalty",
            f"from {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}",
            lambda value: MIN_REPETITION_PENALTY <= value <= MAX_REPETITION_PENALTY,
        ),
        min_tokens=_whole_number(generation_config, "min_new_tokens", 0),
    )


def _record_ignored(generation_config: Mapping[str, object], ledger: Ledger) -> None:
    for field, value in generation_config.items():
        if field in _HONOURED or field in _INFORMATIONAL or field.startswith(_ASSISTED):
            continue
        if value is None or value in ([], {}) or value in _NEUTRAL.get(field, ()):
            continue
        ledger.degrade(
            f"generation_config.json: {field} = {value!r}"[:200],
            "is ignored: it is not taken from the model's files, so output differs from what the model's authors set",
            "remove the field to accept that, or set an equivalent sampling parameter on each request",
        )


def _token_ids(config: Mapping[str, object]) -> frozenset[int]:
    value = config.get("eos_token_id")
    if value is None:
        return frozenset()
    found: set[int] = set()
    for token_id in value if isinstance(value, list) else [value]:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise _wrong("eos_token_id", "a token id or a list of them", value)
        found.add(token_id)
    return frozenset(found)


def _number(config: Mapping[str, object], field: str, described: str, allows: Callable[[float], bool]) -> float | None:
    """A number in the range that is allowed for a request's parameter. NaN is always refused."""
    value = config.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not allows(value):
        raise _wrong(field, f"a number {described}", value)
    return float(value)


def _top_k(config: Mapping[str, object]) -> int | None:
    """The number of tokens to keep; -1 and 0 both mean all and become 0."""
    value = _whole_number(config, "top_k", -1)
    return None if value is None else max(value, 0)


def _whole_number(config: Mapping[str, object], field: str, lowest: int) -> int | None:
    highest = 2**31 - 1
    value = _number(config, field, f"from {lowest} to {highest}", lambda value: lowest <= value <= highest)
    if value is None:
        return None
    if not value.is_integer():
        raise _wrong(field, "a whole number", value)
    return int(value)


def _flag(config: Mapping[str, object], field: str) -> bool | None:
    value = config.get(field)
    if value is None or isinstance(value, bool):
        return value
    raise _wrong(field, "true or false", value)


def _wrong(field: str, expected: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"generation defaults: expected {expected} under {field!r}, got {str(value)[:80]}. Correct the model's files."
    )
