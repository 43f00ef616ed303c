"""Typed reading of a Hugging Face config.

Owns the type checks, and the lists of fields that may have no effect: informational ones, and idle ones of a family.
Does not decide whether a field has an effect: `field_effects` finds that out by changing it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from sightline.core.errors import UnsupportedModelError

_NAMES = """
    _attn_implementation_autoset _name_or_path _sliding_window_pattern add_cross_attention architectures
    attention_dropout auto_map begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id dtype eos_token_id finetuning_task hidden_dropout id2label
    initializer_range is_decoder is_encoder_decoder is_llama_config label2id max_length num_return_sequences
    output_attentions output_hidden_states pad_token_id prefix pretraining_tp problem_type return_dict sep_token_id
    task_specific_params tokenizer_class torch_dtype transformers.js_config transformers_version unsloth_fixed
    use_cache
"""
INFORMATIONAL = frozenset(_NAMES.split())
"""Fields that do not change what a forward computes, in any family."""
_NOTED_NAMES = """
    _attn_implementation _commit_hash _model_name_or_path attn_implementation bos_token cls_token_id eos_token
    gradient_checkpointing mask_token_id model_name_or_path pad_token unk_token unk_token_id unsloth_version
"""
NOTED = frozenset(_NOTED_NAMES.split())
"""Fields that tools leave in configs and that no family reads: special tokens, origins, choices of a kernel."""

MAX_LAYERS = 4096
"""The limit for layers, heads and experts, far above any real model: a config with more is broken or hostile."""
MAX_COUNT = 2**40


class ConfigReader:
    """Typed access to a config.

    A default is for a missing field. A null is refused unless the method says otherwise, as in transformers.
    """

    def __init__(self, config: Mapping[str, object], family: str) -> None:
        self._config = config
        self._family = family
        self.choices: dict[str, tuple[str, ...]] = {}
        """The allowed values of each field that was read with `choice` or `optional_kinds`."""
        self.inert: set[str] = set()
        """Fields of this family that do not change what a forward computes."""
        self.idle: dict[str, str] = {}
        """The reason why a field or section may have no effect beside the other fields."""
        self._other_names: dict[str, tuple[str, ...]] = {}

    def also_called(self, other_names: Mapping[str, tuple[str, ...]]) -> None:
        """Declares other names that a config may use for fields, by the name under which each is read.

        Called before the fields are read. Raises if a config has two names of a field with different values.
        """
        self._other_names.update(other_names)
        config = dict(self._config)
        for name, others in other_names.items():
            for other in others:
                if other in config and config.setdefault(name, config[other]) != config[other]:
                    raise UnsupportedModelError(
                        f"{self._family}: expected one value, got config fields {name} = {config[name]!r} and "
                        f"{other} = {config[other]!r}, which are the same; remove the one that does not hold"
                    )
        self._config = config

    def __contains__(self, name: str) -> bool:
        return name in self._config

    def count(
        self,
        name: str,
        default: int | None = None,
        *,
        least: int = 1,
        most: int = MAX_COUNT,
        null_is_default: bool = False,
    ) -> int:
        """An integer in a range, by default a positive one."""
        value = self._get(name, default)
        value = default if value is None and null_is_default else value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._unexpected(name, f"an integer from {least} to {most}", value)
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
            raise self._unexpected(name, "a finite number above 0", value)
        return float(value)

    def negative(self, name: str, default: float) -> float:
        """A finite number below 0."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -math.inf < value < 0.0:
            raise self._unexpected(name, "a finite number below 0", value)
        return float(value)

    def optional_positive(self, name: str, *, absent: float | None = None) -> float | None:
        """A finite number above 0; None if the field is null, `absent` if it is missing."""
        return None if self._get(name, absent) is None else self.positive(name, absent)

    def optional_count(self, name: str, *, absent: int | None = None) -> int | None:
        """A positive integer; None if the field is null, `absent` if it is missing."""
        return None if self._get(name, absent) is None else self.count(name, absent)

    def heads(self) -> tuple[int, int]:
        """The numbers of query heads and key-value heads; the first is a multiple of the second."""
        num_heads = self.count("num_attention_heads", most=MAX_LAYERS)
        num_kv_heads = self.count("num_key_value_heads", num_heads, most=MAX_LAYERS, null_is_default=True)
        if num_heads % num_kv_heads:
            raise self._unexpected("num_key_value_heads", f"a divisor of {num_heads} attention heads", num_kv_heads)
        return num_heads, num_kv_heads

    def num_layers(self) -> int:
        return self.count("num_hidden_layers", most=MAX_LAYERS)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._unexpected(name, "true or false", value)
        return value

    def optional_choice(self, name: str, known: tuple[str, ...]) -> str | None:
        """One of the `known` names; None if the field is null or missing."""
        self.choices[name] = known
        return None if self._get(name, None) is None else self.choice(name, known, known[0])

    def text(self, name: str) -> str:
        value = self._get(name, None)
        if not isinstance(value, str):
            raise self._unexpected(name, "text", value)
        return value

    def choice(self, name: str, known: tuple[str, ...], default: str) -> str:
        """One of the `known` names."""
        self.choices[name] = known
        value = self._get(name, default)
        if not isinstance(value, str) or value not in known:
            raise self._unexpected(name, f"one of {', '.join(known)}", value)
        return value

    def optional_list(self, name: str) -> list[object] | None:
        value = self._get(name, None)
        if value is not None and not isinstance(value, (list, tuple)):
            raise self._unexpected(name, "a list", value)
        return None if value is None else list(value)

    def indices(self, name: str) -> frozenset[int]:
        """A list of layer numbers; empty if the field is null or missing."""
        listed, num_layers = self.optional_list(name) or [], self.num_layers()
        numbers = frozenset(value for value in listed if isinstance(value, int) and not isinstance(value, bool))
        if len(numbers) != len(listed) or not numbers <= frozenset(range(num_layers)):
            raise self._unexpected(name, f"a list of different integers from 0 to {num_layers - 1}", listed)
        return numbers

    def optional_kinds(self, name: str, known: tuple[str, ...]) -> tuple[str, ...] | None:
        """One of the `known` names for each layer; None if the field is null or missing."""
        self.choices[name] = known
        listed = self.optional_list(name)
        if listed is None:
            return None
        kinds, num_layers = tuple(str(kind) for kind in listed), self.num_layers()
        if len(kinds) != num_layers or set(kinds) - set(known):
            raise UnsupportedModelError(
                f"{self._family}: expected {name} of {num_layers} entries out of {' and '.join(known)}, got {kinds}"
            )
        return kinds

    def optional_pattern(self, name: str, letters: Mapping[str, str]) -> tuple[str, ...] | None:
        """Like `optional_kinds`; the field may also be a text with a letter for each layer."""
        known = tuple(letters.values())
        text = self._get(name, None)
        if not isinstance(text, str):
            return self.optional_kinds(name, known)
        if len(text) != self.num_layers() or set(text) - set(letters):
            raise self._unexpected(name, f"{self.num_layers()} letters out of {' and '.join(letters)}", text)
        return tuple(letters[letter] for letter in text)

    def optional_section(self, name: str) -> Mapping[str, object] | None:
        value = self._get(name, None)
        if value is not None and not isinstance(value, Mapping):
            raise self._unexpected(name, "an object", value)
        return value

    def section(self, name: str, known: frozenset[str]) -> ConfigReader:
        """Typed access to a section, which is empty if the field is null or missing. Raises if it has other keys."""
        found = self.optional_section(name) or {}
        if unknown := set(found) - known:
            raise self._unexpected(name, f"an object of {', '.join(sorted(known))}", sorted(unknown))
        return ConfigReader(found, f"{self._family}: {name}")

    def require(self, name: str, *neutral: object) -> None:
        """Raises unless the field is missing or has one of the `neutral` values, which do not change the result."""
        if name in self._config and self._get(name, None) not in neutral:
            raise UnsupportedModelError(
                f"{self._family}: config field {name} = {self._config[name]!r} changes the result and is not "
                f"supported; supported: {', '.join(repr(value) for value in neutral)}"
            )

    def informational(self, *names: str) -> None:
        """Declares fields of this family that do not change what a forward computes."""
        self.inert.update(names)

    def may_idle(self, why: str, *names: str) -> None:
        """Declares fields, or sections, that have no effect beside certain values of other fields."""
        known = [each for name in names for each in (name, *self._other_names.get(name, ()))]
        self.idle.update(dict.fromkeys(known, why))

    def _get(self, name: str, default: object) -> object:
        return self._config.get(name, default)

    def _unexpected(self, name: str, expected: str, value: object) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._family}: expected config field {name} to be {expected}, got {value!r}")
