"""Tiny models of the families beside Llama and Gemma 3, and GGUF files of them as llama.cpp's converter lays them out.

Tensor names come from the `gguf` package, which the converter uses as well.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from gguf import GGUFWriter
from safetensors.torch import load_file

from support.gguf_files import (
    NOTHING,
    VOCABULARY,
    add_metadata,
    add_sizes,
    add_tensor,
    add_vocabulary,
    close,
    randomised,
)

SIZE = 64
YARN: Mapping[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def tiny(family: str, **changes: Any) -> Any:
    """A random model of the family, which is named as in `general.architecture`; "mistral" beside those."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": SIZE,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        **_SPECIFIC[family],
        **changes,
    }
    torch.manual_seed(0)
    name = _CLASSES[family]
    config = getattr(transformers, f"{name}Config")(**settings)
    return randomised(getattr(transformers, f"{name}ForCausalLM")(config))


_CLASSES = {
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3moe": "Qwen3Moe",
    "gemma2": "Gemma2",
    "gpt-oss": "GptOss",
    "mistral": "Mistral",
}
_SPECIFIC: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma2": {
        "head_dim": 32,
        "sliding_window": 8,
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
    },
    "gpt-oss": {
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "num_hidden_layers": 3,
        "rope_parameters": dict(YARN),
    },
    "mistral": {"sliding_window": 8, "head_dim": 32},
}


def disk_weights(model: Any) -> dict[str, torch.Tensor]:
    """Names and layouts as transformers saves the model."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def write_family(
    path: Path, family: str, model: Any, *, quantised: str = "F32", extra: Mapping[str, object] = NOTHING
) -> None:
    """A GGUF of the model; `extra` holds more metadata, and arrays as more tensors."""
    config = model.config
    writer = GGUFWriter(path, family)
    add_sizes(writer, config, rope_theta=config.rope_parameters["rope_theta"])
    if family != "qwen2":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    _METADATA.get(family, lambda _writer, _config: None)(writer, config)
    add_vocabulary(writer)
    add_metadata(writer, extra)
    for name, weight in converted(family, model):
        add_tensor(writer, name, weight, quantised if weight.dim() > 1 and name.endswith(".weight") else "F32")
    close(writer)


def _add_experts(writer: GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def _add_qwen3moe(writer: GGUFWriter, config: Any) -> None:
    _add_experts(writer, config)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_gemma2(writer: GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_gpt_oss(writer: GGUFWriter, config: Any) -> None:
    _add_experts(writer, config)
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])


_METADATA: Mapping[str, Callable[[GGUFWriter, Any], None]] = {
    "qwen3moe": _add_qwen3moe,
    "gemma2": _add_gemma2,
    "gpt-oss": _add_gpt_oss,
}


def converted(family: str, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a GGUF file of the model, by their names in it."""
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[family]
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    for name, weight in _prepared(family, disk_weights(model)).items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        yield found, weight


def _prepared(family: str, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the converter makes of the tensors before it names them."""
    match family:
        case "gemma2":
            return {name: weight + 1.0 if name.endswith("norm.weight") else weight for name, weight in weights.items()}
        case "qwen3moe":
            return _stacked_experts(weights)
        case "gpt-oss":
            return dict(entry for name, weight in weights.items() for entry in _split_gpt_oss(name, weight))
        case _:
            return dict(weights)


def _stacked_experts(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    experts: dict[str, dict[int, torch.Tensor]] = {}
    plain = {name: weight for name, weight in weights.items() if ".experts." not in name}
    for name in weights.keys() - plain.keys():
        prefix, rest = name.split(".experts.")
        number, projection = rest.split(".", 1)
        experts.setdefault(f"{prefix}.experts.{projection}", {})[int(number)] = weights[name]
    stacked = {name: torch.stack([parts[i] for i in range(len(parts))]) for name, parts in experts.items()}
    return {**plain, **stacked}


def _split_gpt_oss(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if name.endswith(".sinks"):
        yield f"{name}.weight", weight
        return
    if ".experts." not in name:
        yield name, weight
        return
    prefix, _, projection = name.rpartition(".")
    suffix = "bias" if projection.endswith("_bias") else "weight"
    rows = weight if suffix == "bias" else weight.transpose(-1, -2)
    if projection.startswith("down_proj"):
        yield f"{prefix}.down_proj.{suffix}", rows.contiguous()
        return
    yield f"{prefix}.gate_proj.{suffix}", rows[:, ::2].contiguous()
    yield f"{prefix}.up_proj.{suffix}", rows[:, 1::2].contiguous()
