"""Tiny DeepSeek V4 models, whose windows, entries and indexers are small enough to matter within a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, PreTrainedModel

from support.tiny_models import VOCAB, with_weights

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
INDEX_HEADS = 16
"""Many: scores of few heads are often exactly 0, and the order of such ties is not the same everywhere."""
TOP_K = 6
YARN: dict[str, object] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 256,
}


def v4_config(
    kinds: Sequence[str] = (WINDOW, SPARSE, HEAVY, SPARSE), ratios: tuple[int, int] = (4, 16), **options: object
) -> DeepseekV4Config:
    """Dimensions that cannot be mistaken for each other."""
    sizes: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": 6,
        "head_dim": 16,
        "q_lora_rank": 22,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 1024,
        "layer_types": list(kinds),
        "compress_rates": dict(zip((SPARSE, HEAVY), ratios, strict=True)),
        "num_hash_layers": 2,
        "sliding_window": 12,
        "o_groups": 3,
        "o_lora_rank": 10,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": 14,
        "index_topk": TOP_K,
        "partial_rotary_factor": 0.5,
        "rope_theta": 100.0,
        "compress_rope_theta": 300.0,
        "rope_scaling": YARN,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 4,
        "swiglu_limit": 0.8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "attn_implementation": "eager",
    }
    return DeepseekV4Config(**sizes | options)


V4: dict[str, Callable[[], DeepseekV4Config]] = {
    "deepseek_v4": v4_config,
    "deepseek_v4_all": partial(v4_config, kinds=(HEAVY, SPARSE), index_topk=512, num_hash_layers=0, hc_mult=4),
    "deepseek_v4_real": partial(v4_config, ratios=(4, 128), sliding_window=16, index_topk=16),
    "deepseek_v4_wide": partial(v4_config, hidden_size=64, moe_intermediate_size=32),
}
"""With a choice among entries, with all of them chosen, with the published tokens per entry, and
with experts of whole blocks of fp4."""


def make_v4(family: str) -> PreTrainedModel:
    """A model with weights of a scale at which every feature matters."""
    torch.manual_seed(11)
    model = with_weights(DeepseekV4ForCausalLM(V4[family]()).eval())
    generator = torch.Generator().manual_seed(7)
    for layer in model.model.layers:
        gate = layer.mlp.gate
        if layer.mlp.is_hash:
            ranks = torch.rand(gate.tid2eid.shape[0], model.config.n_routed_experts, generator=generator)
            gate.tid2eid.copy_(ranks.argsort(dim=1)[:, : gate.tid2eid.shape[1]])
        else:
            gate.e_score_correction_bias.normal_(std=0.3, generator=generator)
    return model
