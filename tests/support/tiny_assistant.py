"""A tiny Gemma 4 assistant, and its steps in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig, PreTrainedModel

from support.tiny_models import scale_weights

SLIDING, FULL = "sliding_attention", "full_attention"


def make_assistant(
    target: PreTrainedModel, *, clusters: tuple[int, int] | None = None, **options: object
) -> PreTrainedModel:
    """An assistant of three layers for the target, with weights of a scale at which every feature matters.

    `clusters` are the number of clusters of tokens and of those that are chosen; None if there are none.
    """
    theirs = target.config
    sizes = {
        "vocab_size": theirs.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "layer_types": [SLIDING, FULL, FULL],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": theirs.sliding_window,
        "rope_parameters": theirs.rope_parameters,
        "max_position_embeddings": theirs.max_position_embeddings,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    text = Gemma4TextConfig(**sizes | options, attn_implementation="eager")
    ordered: dict[str, object] = {}
    if clusters is not None:
        ordered = {
            "use_ordered_embeddings": True,
            "num_centroids": clusters[0],
            "centroid_intermediate_top_k": clusters[1],
        }
    config = Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=theirs.hidden_size, attn_implementation="eager", **ordered
    )
    torch.manual_seed(13)
    model = Gemma4AssistantForCausalLM(config).eval()
    scale_weights(model, seed=17)
    for index, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.7 + 0.2 * index)
    if model.masked_embedding is not None:
        order = torch.randperm(theirs.vocab_size, generator=torch.Generator().manual_seed(19))
        model.masked_embedding.token_ordering.copy_(order)
    return model


class AssistantStep(NamedTuple):
    """What one step of a round gave."""

    logits: Tensor
    """[vocab_size]."""
    state: Tensor
    """[target's hidden size]."""


class TargetOutputs(NamedTuple):
    """What transformers' target gives to an assistant."""

    state: Tensor
    """[hidden_size]: of its last token, behind the final norm."""
    shared: dict[str, tuple[Tensor, Tensor]]
    """Keys and values of the last layer of each kind that has its own."""


def target_outputs(target: PreTrainedModel, tokens: Sequence[int]) -> TargetOutputs:
    with torch.no_grad():
        output = target(
            torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True, return_shared_kv_states=True
        )
    return TargetOutputs(output.hidden_states[-1][0, -1], dict(output.shared_kv_states))


def reference_round(
    assistant: PreTrainedModel, target: PreTrainedModel, context: Sequence[int], drafted: Sequence[int]
) -> list[AssistantStep]:
    """The steps behind a context, in which the last tokens are `drafted`, all at one position."""
    state, shared = target_outputs(target, context)
    steps = []
    for token in drafted:
        with torch.no_grad():
            embedded = target.get_input_embeddings()(torch.tensor([[token]]))
            output = assistant(
                inputs_embeds=torch.cat([embedded, state.view(1, 1, -1)], dim=-1),
                position_ids=torch.tensor([[len(context)]]),
                shared_kv_states=shared,
            )
        state = output.last_hidden_state[0, 0]
        steps.append(AssistantStep(output.logits[0, 0], state))
    return steps
