"""The command-line options that request the same engine as a config.

Owns the conversion of an `EngineConfig` to command-line words. The options are defined in `sightline.cli.options`; a
test keeps both consistent.
"""

from __future__ import annotations

from collections.abc import Mapping

from sightline.core.config import EngineConfig

ATTENTION_FLAGS: Mapping[str, str] = {
    "task": "--task",
    "device": "--device",
    "dtype": "--dtype",
    "quantization": "--quantization",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "page_size": "--page-size",
    "cache_tokens": "--cache-tokens",
    "kv_cache_dtype": "--kv-cache-dtype",
    "memory_fraction": "--memory-fraction",
    "attention_backend": "--attention-backend",
    "prefill_attention_backend": "--prefill-attention-backend",
    "decode_attention_backend": "--decode-attention-backend",
}
"""Settings that change what is asked of attention, beside the model and `prefix_caching`, whose option is a switch."""
PREFIX_CACHING = {True: "--enable-prefix-caching", False: "--disable-radix-cache"}


def prove_words(config: EngineConfig, model: str) -> tuple[str, ...]:
    """The words after `sightline` on a command line that proves attention for the engine; `model` is its name or
    path."""
    usual = vars(EngineConfig())
    words = ["conformance", "--model", model]
    for name, flag in ATTENTION_FLAGS.items():
        value = vars(config)[name]
        if value != usual[name]:
            words += [flag, str(value)]
    if config.prefix_caching is not None:
        words.append(PREFIX_CACHING[config.prefix_caching])
    return tuple(words)
