"""A model that costs next to nothing per token, with the default model's tokenizer and template.

The front end meets the same texts, ids and vocabulary as with the default model, at many times the rate.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from sightline.models.loading.default_model import default_model_path
from sightline.models.loading.gguf.file import GgufFile
from sightline.text.tokenizers.gguf import tokenizer_from_gguf

CONTEXT = 8192
WIDTH = 16
_LAYER = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
)


def save_swift_model(folder: Path) -> Path:
    """Makes the folder: one layer with random weights, and the context of the default model."""
    data = tokenizer_from_gguf(GgufFile(default_model_path()).metadata).to_data()
    vocab_size = len(json.loads(data.vocabulary)["model"]["vocab"])
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": WIDTH,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    random = torch.Generator().manual_seed(5)
    weights = {"model.norm.weight": torch.ones(WIDTH)}
    weights["model.embed_tokens.weight"] = torch.randn(vocab_size, WIDTH, generator=random)
    for name in _LAYER:
        shape = (WIDTH,) if "norm" in name else (WIDTH, WIDTH)
        weights[f"model.layers.0.{name}.weight"] = 0.3 * torch.randn(shape, generator=random)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(data.vocabulary)
    told = {"chat_template": data.template, "bos_token": data.template_bos, "eos_token": data.template_eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder
