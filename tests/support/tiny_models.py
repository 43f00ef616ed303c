"""Tiny random models that transformers and Sightline both load, scaled so that no feature hides."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from sightline.cache.layout import Layout, arrange_free_pages
from sightline.core.batch import RowWork
from sightline.core.config import EngineConfig
from sightline.core.ledger import Ledger
from sightline.models.loading.opening import open_checkpoint
from sightline.runner.batching import assemble
from sightline.runner.build import build_runtime
from sightline.runner.runtime import Runtime
from sightline.testing.conformance.rig import Unused, fill_pools
from support.tiny_deepseek import DEEPSEEK, DENSE_DEEPSEEK
from support.tiny_gemma4 import GEMMA4
from support.tiny_glm import GLM

VOCAB = 101
WEIGHT_SCALE = 0.3
Models = dict[str, tuple[PreTrainedModel, Path]]
"""By family: the model, and the folder that it is saved in."""


def _common() -> dict[str, object]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "attn_implementation": "eager",
    }


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_common(), num_hidden_layers=3, rope_theta=100.0, attention_bias=True))


def _llama3() -> PreTrainedModel:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config = LlamaConfig(
        **_common(), num_hidden_layers=2, rope_parameters=rope, tie_word_embeddings=True, mlp_bias=True
    )
    return LlamaForCausalLM(config)


def _gemma3() -> PreTrainedModel:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
    config = Gemma3TextConfig(
        **_common(),
        num_hidden_layers=4,
        sliding_window=10,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters=rope,
        query_pre_attn_scalar=5,
        final_logit_softcapping=30.0,
        attention_bias=True,
    )
    return Gemma3ForCausalLM(config)


def _mistral() -> PreTrainedModel:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
    return MistralForCausalLM(MistralConfig(**_common(), num_hidden_layers=2, sliding_window=9, rope_parameters=rope))


def _qwen2() -> PreTrainedModel:
    rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
    config = Qwen2Config(
        **_common(),
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=11,
        max_window_layers=1,
        rope_parameters=rope | {"beta_fast": 2.0, "beta_slow": 0.5},
    )
    return Qwen2ForCausalLM(config)


def _qwen3() -> PreTrainedModel:
    config = Qwen3Config(
        **_common(), num_hidden_layers=2, rope_theta=100.0, tie_word_embeddings=True, attention_bias=True
    )
    return Qwen3ForCausalLM(config)


def _gemma2() -> PreTrainedModel:
    config = Gemma2Config(
        **_common(),
        num_hidden_layers=3,
        sliding_window=10,
        rope_theta=100.0,
        query_pre_attn_scalar=5,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=20.0,
    )
    return Gemma2ForCausalLM(config)


def _qwen3_moe(*, norm_topk_prob: bool, **options: object) -> PreTrainedModel:
    config = Qwen3MoeConfig(
        **_common(),
        num_hidden_layers=3,
        rope_theta=100.0,
        moe_intermediate_size=24,
        num_experts=7,
        num_experts_per_tok=3,
        norm_topk_prob=norm_topk_prob,
        **options,
    )
    return Qwen3MoeForCausalLM(config)


def _gpt_oss() -> PreTrainedModel:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 8.0,
        "beta_fast": 2.0,
        "beta_slow": 0.7,
        "truncate": False,
        "original_max_position_embeddings": 32,
    }
    config = GptOssConfig(
        **_common() | {"intermediate_size": 32, "hidden_size": 64},
        num_hidden_layers=3,
        sliding_window=9,
        num_local_experts=6,
        num_experts_per_tok=2,
        swiglu_limit=1.5,
        rope_parameters=rope,
    )
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp.experts.limit = config.swiglu_limit  # which older releases of transformers leave at 7
    return model


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "llama3": _llama3,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "qwen3_moe": lambda: _qwen3_moe(
        norm_topk_prob=True, mlp_only_layers=[1], use_sliding_window=True, sliding_window=12
    ),
    "qwen3_moe_plain": lambda: _qwen3_moe(norm_topk_prob=False, decoder_sparse_step=2),
    "gpt_oss": _gpt_oss,
    **{family: partial(make, _common()) for family, make in {**DEEPSEEK, **GLM, **GEMMA4}.items()},
}


def make_model(family: str) -> PreTrainedModel:
    """A model with weights of a scale at which every feature matters."""
    torch.manual_seed(11)
    return with_weights(FAMILIES[family]().eval())


def make_dense_deepseek(family: str) -> PreTrainedModel:
    """Like `make_model`, without experts."""
    torch.manual_seed(11)
    return with_weights(DENSE_DEEPSEEK[family](_common()).eval())


def with_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The model with random weights of a scale at which every feature matters."""
    scale_weights(model, seed=5)
    return model


def scale_weights(module: Module, seed: int) -> None:
    """Gives every parameter random values of a scale at which every feature matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            centre = 0.0 if parameter.dim() > 1 else float(parameter.mean())
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(centre + noise * WEIGHT_SCALE)


def reference_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """[len(tokens), vocab]: one full forward by transformers."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def load_runtime(folder: Path, config: EngineConfig, *, strict: bool = True) -> Runtime:
    """The runtime over poisoned, shuffled pools."""
    ledger = Ledger(strict=strict)
    runtime = build_runtime(config, open_checkpoint(folder, ledger), ledger)
    fill_pools(runtime.store, Unused.NAN)
    arrange_free_pages(runtime.store, Layout.SHUFFLED, seed=3)
    return runtime


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Of the logits' scale."""
    return float((got - expected).abs().max() / expected.abs().max())


def random_prompts(lengths: Sequence[int], seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    order = random.Random(seed)
    return [[order.randrange(3, vocab) for _ in range(length)] for length in lengths]


def prompts_alike(shared: int, count: int, own: int) -> list[list[int]]:
    """Prompts that begin alike and end differently."""
    [beginning] = random_prompts([shared], seed=5)
    return [beginning + end for end in random_prompts([own] * count, seed=6)]


def stepped_logits(
    runtime: Runtime, sequences: Sequence[Sequence[int]], prompt_lens: Sequence[int], chunk: int
) -> list[Tensor]:
    """Each sequence's logits from its prompt's last token on, computed in mixed steps.

    Sequence i joins at step i: prompts go in chunks while earlier ones decode, one given token at a time.
    """
    store = runtime.store
    rows = [store.open_row() for _ in sequences]
    done = [0] * len(sequences)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    step = 0
    while any(count < len(sequence) for count, sequence in zip(done, sequences, strict=True)):
        active = [i for i in range(min(step + 1, len(sequences))) if done[i] < len(sequences[i])]
        work = []
        for i in active:
            count = min(chunk, prompt_lens[i] - done[i]) if done[i] < prompt_lens[i] else 1
            store.grow_row(rows[i], done[i] + count)
            new = sequences[i][done[i] : done[i] + count]
            work.append(RowWork(rows[i], new, done[i], num_logits=done[i] + count >= prompt_lens[i]))
        batch = assemble(work, store)
        result = runtime.runner.forward(runtime.planner.plan(batch))
        for index, row in enumerate(batch.logit_rows):
            logits[active[row]].append(result[index])
        for i, row_work in zip(active, work, strict=True):
            done[i] += len(row_work.tokens)
            store.lengths.commit(rows[i], done[i])
        step += 1
    for row in rows:
        store.close_row(row)
    return [torch.stack(rows_logits) for rows_logits in logits]
