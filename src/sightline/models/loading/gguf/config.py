"""Translation of GGUF metadata to the keys of a Hugging Face config.json.

Owns the rule that no key is dropped unseen: one that changes the result and is not supported is refused, one
whose meaning is not known is recorded. Does not know what an architecture's keys mean (`families` does), and does not
read bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sightline.core.errors import CheckpointError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.models.field_effects import fields_without_effect
from sightline.models.loading.gguf.config_values import ArchitectureKeys, TensorShapes
from sightline.models.loading.gguf.families import CONFIG_READERS
from sightline.text.tokenizers.gguf_metadata import GgufMetadata


def translate_config(metadata: GgufMetadata, shapes: TensorShapes, ledger: Ledger) -> dict[str, object]:
    """The model's config as a Hugging Face config.json would have it."""
    name = metadata.required_text("general.architecture")
    reader = CONFIG_READERS.get(name)
    if reader is None:
        raise UnsupportedModelError(
            f"expected a GGUF file of one of the architectures {', '.join(sorted(CONFIG_READERS))}, got {name!r}. "
            "Use the model's folder of safetensors, or another model."
        )
    _refuse_split_file(metadata)
    for key in metadata.keys_under(f"{name}."):
        suffix = key.removeprefix(f"{name}.")
        if suffix in reader.keys or suffix in _SHARED_KEYS:
            continue
        if suffix in _UNSUPPORTED_UNLESS:
            _refuse_unless_neutral(metadata, key, _UNSUPPORTED_UNLESS[suffix])
            continue
        ledger.degrade(
            f"GGUF metadata {key!r}",
            "is ignored: its meaning for this architecture is not known",
            "check the model's output against another engine, or convert the model again",
        )
    config = reader.read(ArchitectureKeys(metadata, shapes, name))
    _account_for_idle_keys(metadata, shapes, ledger, name, config)
    return config


def _account_for_idle_keys(
    metadata: GgufMetadata, shapes: TensorShapes, ledger: Ledger, name: str, config: dict[str, object]
) -> None:
    """Records known keys that `config` does not depend on: that a reader looks at a key does not prove an effect."""
    reader = CONFIG_READERS[name]
    known = {f"{name}.{suffix}" for suffix in (reader.keys | _SHARED_KEYS) - _OF_TRAINING}
    stated = {key: metadata.raw(key) for key in metadata.keys_under(f"{name}.") if key in known}

    def read(changed: Mapping[str, object]) -> dict[str, object]:
        try:
            return reader.read(ArchitectureKeys(metadata.replaced(changed), shapes, name))
        except CheckpointError as error:
            raise UnsupportedModelError(str(error)) from error

    for (key,) in fields_without_effect(stated, read, config, {}):
        suffix = key.removeprefix(f"{name}.")
        why = _IDLE.get(suffix, _IDLE.get(suffix.rpartition(".")[0]))
        if why is not None:
            ledger.note(f"GGUF metadata {key!r}", f"has no effect: {why}")
        else:
            ledger.degrade(
                f"GGUF metadata {key!r}",
                "has no effect beside the other keys",
                "check the model's output, or remove it",
            )


def _refuse_split_file(metadata: GgufMetadata) -> None:
    parts = metadata.integer("split.count")
    if parts is not None and parts > 1:
        raise UnsupportedModelError(
            f"expected a model in one GGUF file, got one of {parts} parts. Join them with `llama-gguf-split --merge`."
        )


_SHARED = """
    embedding_length block_count feed_forward_length context_length vocab_size attention.head_count
    attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon rope.freq_base
    rope.dimension_count rope.scaling.type rope.scaling.factor rope.scaling.original_context_length
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.finetuned rope.scale_linear
"""
_SHARED_KEYS = frozenset(_SHARED.split())
"""Keys that every reader uses."""
_OF_TRAINING = frozenset({"rope.scaling.finetuned"})
"""Keys that change nothing."""
_IDLE: Mapping[str, str] = MappingProxyType(
    {
        "rope.scaling": "this kind of rope scaling does not use it",
        "feed_forward_length": "every layer has experts, whose size is expert_feed_forward_length",
    }
)
"""The reason why a key, or a group of keys, may have no effect beside the others."""

_OFF_AT_ZERO = """
    expert_count expert_used_count expert_shared_count leading_dense_block_count attention.sliding_window
    attention.clamp_kqv attention.max_alibi_bias attention.temperature_length attention.temperature_scale
    attn_logit_softcapping final_logit_softcapping rope.scaling.yarn_log_multiplier pooling_type
"""
_OFF_AT_ONE = "logit_scale residual_scale embedding_scale rope.scaling.attn_factor rope.scaling.yarn_attn_factor"
_UNSUPPORTED_UNLESS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        **dict.fromkeys(_OFF_AT_ZERO.split(), (0,)),
        **dict.fromkeys(_OFF_AT_ONE.split(), (1,)),
        "expert_group_count": (0, 1),
        "expert_weights_scale": (0, 1),
        "expert_weights_norm": (True,),
        "attention.scale": (),
        "attention.causal": (True,),
        "use_parallel_residual": (False,),
        "rope.scaling.yarn_ext_factor": (1, -1),
    }
)
"""Keys that change the result, with the values under which they do not."""


def _refuse_unless_neutral(metadata: GgufMetadata, key: str, neutral: tuple[object, ...]) -> None:
    value = metadata.raw(key)
    if value not in neutral:
        allowed = " or ".join(map(repr, neutral)) or "no value"
        raise UnsupportedModelError(
            f"GGUF metadata {key!r}: expected {allowed}, got {value!r}, which changes the result and is not "
            "supported for this architecture. Use the model's folder of safetensors."
        )
