"""Translation of GGUF metadata to the keys of a Hugging Face config.json.

Owns the rule that no key is dropped unseen: one that changes the result and is not supported is refused, one
whose meaning is not known is recorded. Does not know what an architecture's keys mean (`gguf_families` does), and
does not read bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sightline.core.errors import CheckpointError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.models.field_effects import fields_without_effect
from sightline.models.loading.gguf.config_values import TensorShapes
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
    config = reader.read(metadata, shapes)
    _account_for_idle_keys(metadata, shapes, ledger, name, config)
    return config


def _account_for_idle_keys(
    metadata: GgufMetadata, shapes: TensorShapes, ledger: Ledger, name: str, config: dict[str, object]
) -> None:
    """Puts known keys that `config` does not depend on into the ledger: that a reader looks at them proves nothing."""
    reader = CONFIG_READERS[name]
    known = {f"{name}.{suffix}" for suffix in (reader.keys | _SHARED_KEYS) - _OF_TRAINING}
    stated = {key: metadata.raw(key) for key in metadata.keys_under(f"{name}.") if key in known}

    def read(changed: Mapping[str, object]) -> dict[str, object]:
        try:
            return reader.read(metadata.replaced(changed), shapes)
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


_SHARED_KEYS = frozenset(
    {
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "context_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.finetuned",
        "rope.scale_linear",
    }
)
"""Keys that every reader uses."""
_OF_TRAINING = frozenset({"rope.scaling.finetuned"})
"""Keys that change nothing."""
_IDLE: Mapping[str, str] = MappingProxyType(
    {
        "rope.scaling": "this kind of rope scaling does not use it",
        "feed_forward_length": "every layer has experts, whose size is expert_feed_forward_length",
    }
)
"""By key, or group of keys: why it may have no effect beside the others."""

_UNSUPPORTED_UNLESS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "expert_count": (0,),
        "expert_used_count": (0,),
        "expert_shared_count": (0,),
        "expert_group_count": (0, 1),
        "expert_weights_scale": (0, 1),
        "expert_weights_norm": (True,),
        "leading_dense_block_count": (0,),
        "attention.sliding_window": (0,),
        "attention.clamp_kqv": (0,),
        "attention.max_alibi_bias": (0,),
        "attention.scale": (),
        "attention.causal": (True,),
        "attention.temperature_length": (0,),
        "attention.temperature_scale": (0,),
        "attn_logit_softcapping": (0,),
        "final_logit_softcapping": (0,),
        "logit_scale": (1,),
        "residual_scale": (1,),
        "embedding_scale": (1,),
        "use_parallel_residual": (False,),
        "rope.scaling.attn_factor": (1,),
        "rope.scaling.yarn_attn_factor": (1,),
        "rope.scaling.yarn_ext_factor": (1, -1),
        "rope.scaling.yarn_log_multiplier": (0,),
        "pooling_type": (0,),
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
