"""Small checkpoints: saved by transformers as folders, and written as GGUF the way converters lay them out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

VOCABULARY = 64
NOTHING: Mapping[str, object] = MappingProxyType({})

LLAMA_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA3_TENSORS = {
    **LLAMA_TENSORS,
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    return randomised(LlamaForCausalLM(LlamaConfig(**{**settings, **changes})))


def tiny_gemma3(**changes: Any) -> Gemma3ForCausalLM:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
        "max_position_embeddings": 128,
    }
    torch.manual_seed(0)
    return randomised(Gemma3ForCausalLM(Gemma3TextConfig(**{**settings, **changes})))


def randomised(model: Any) -> Any:
    """Norm weights start as ones or zeros, which would hide a missing offset."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model.eval()


def interleave_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The converter's row order: within a head, row i of the first half is followed by row i of the second."""
    size = weight.shape[0] // num_heads
    order = [
        head * size + half * size // 2 + row for head in range(num_heads) for row in range(size // 2) for half in (0, 1)
    ]
    return weight[order]


def gguf_name(name: str, table: Mapping[str, str]) -> str:
    prefix = ""
    if name.startswith("model.layers."):
        layer, name = name.removeprefix("model.layers.").split(".", 1)
        prefix = f"blk.{layer}."
    for ours, theirs in table.items():
        if name == ours or name.startswith(f"{ours}."):
            return prefix + theirs + name.removeprefix(ours)
    raise KeyError(name)


def write_llama(
    path: Path, model: LlamaForCausalLM, *, quantised: str = "F32", extra: Mapping[str, object] = NOTHING
) -> None:
    """A GGUF of a Llama model; `extra` holds more metadata, and arrays as more tensors."""
    config = model.config
    writer = GGUFWriter(path, "llama")
    add_sizes(writer, config, rope_theta=10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    add_vocabulary(writer)
    add_metadata(writer, extra)
    for name, weight in _weights(model).items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        projection = name.split(".")[-2]
        stored = interleave_rows(weight, heads[projection]) if projection in heads else weight
        add_tensor(writer, gguf_name(name, LLAMA_TENSORS), stored, quantised)
    close(writer)


def write_gemma3(path: Path, model: Gemma3ForCausalLM, *, extra: Mapping[str, object] = NOTHING) -> None:
    """A GGUF of a Gemma 3 text model."""
    config = model.config
    writer = GGUFWriter(path, "gemma3")
    add_sizes(writer, config, rope_theta=1000000.0)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    add_vocabulary(writer)
    add_metadata(writer, extra)
    for name, weight in _weights(model).items():
        offset = 1.0 if name.endswith("norm.weight") else 0.0
        add_tensor(writer, gguf_name(name, GEMMA3_TENSORS), weight + offset, "F32")
    close(writer)


def add_sizes(writer: GGUFWriter, config: Any, *, rope_theta: float) -> None:
    """What every family's files say of the model's shape."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope_theta)


def close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _weights(model: Any) -> dict[str, torch.Tensor]:
    tied = model.config.tie_word_embeddings
    return {name: weight for name, weight in model.state_dict().items() if not (tied and name == "lm_head.weight")}


def add_tensor(writer: GGUFWriter, name: str, weight: torch.Tensor, quantised: str) -> None:
    values = weight.detach().to(torch.float32).numpy().astype(numpy.float32)
    kind = GGMLQuantizationType[quantised]
    if kind == GGMLQuantizationType.F32 or values.ndim == 1:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, _packed(values, kind), raw_dtype=kind)


def _packed(values: numpy.ndarray[Any, Any], kind: GGMLQuantizationType) -> numpy.ndarray[Any, Any]:
    """Quantised, or bytes that stand for some other numbers where the package cannot quantise to the type."""
    try:
        packed: numpy.ndarray[Any, Any] = quantize(values, kind)
    except NotImplementedError:
        return random_blocks(values.shape, kind)
    return packed


def random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType) -> numpy.ndarray[Any, Any]:
    """Bytes that decode to finite numbers in every type: as halves of a scale they stay below one."""
    elements, num_bytes = GGML_QUANT_SIZES[kind]
    row = shape[-1] // elements * num_bytes
    return numpy.random.default_rng(3).integers(0, 60, (*shape[:-1], row), dtype=numpy.uint8)


def add_vocabulary(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"<{index}>" for index in range(VOCABULARY)])
    writer.add_token_types([3] * VOCABULARY)
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def add_metadata(writer: GGUFWriter, extra: Mapping[str, object]) -> None:
    for key, value in extra.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
            case numpy.ndarray():
                writer.add_tensor(key, value)
            case _:
                raise TypeError(f"no metadata type for {value!r}")
