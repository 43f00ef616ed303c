"""The command-line options that request the same engine as a config.

Owns the conversion of an `EngineConfig` to command-line words. `sightline.cli.options` derives the options from the
same settings; a test keeps both consistent.
"""

from __future__ import annotations

from sightline.core.config import EngineConfig
from sightline.core.settings import stated

WITHOUT_ATTENTION = (
    *("model", "max_queued_requests", "async_scheduling", "require_proof", "seed"),
    *("chat_template", "skip_tokenizer_init", "skip_weight_check", "max_step_ms", "strict", "paranoid"),
    *("layer_kernels", "cuda_graph_sizes", "enforce_eager", "speculative_config", "host_cache_gib"),
    *("tool_call_parser", "reasoning_parser", "dist_timeout", "enable_two_batch_overlap", "data_parallel_size"),
    "enable_expert_parallel",
)
"""Settings that change nothing that is asked of attention, and the model, which is always named."""


def flag(name: str, *, negated: bool = False) -> str:
    """The option for a name; `negated` for the one that turns a switch off."""
    return f"--{'no-' if negated else ''}{name.replace('_', '-')}"


def prove_words(config: EngineConfig, model: str) -> tuple[str, ...]:
    """The words after `sightline` on a command line that proves attention for the engine; `model` is its name or
    path."""
    words = ["conformance", "--model", model]
    for name, setting in stated(EngineConfig).items():
        value = getattr(config, name)
        if name not in WITHOUT_ATTENTION and value != setting.default:
            words += [flag(name, negated=not value)] if setting.kind is bool else [flag(name), str(value)]
    return tuple(words)
