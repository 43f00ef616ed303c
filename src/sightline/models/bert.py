"""BERT, and the embedders that have its architecture (MiniLM, BGE, E5, GTE)."""

from __future__ import annotations

from sightline.attention.spec import SoftmaxSpec
from sightline.core.errors import UnsupportedModelError
from sightline.layers.activation import Activation
from sightline.models.config_reader import ConfigReader
from sightline.models.encoder import EncoderDefinition

_ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "silu": Activation.SILU,
}
_NO_EFFECT = """
    attention_probs_dropout_prob classifier_dropout directionality gradient_checkpointing hidden_dropout_prob
    pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type tie_word_embeddings
"""


def bert(config: ConfigReader) -> EncoderDefinition:
    """Reads a BERT config."""
    config.informational(*_NO_EFFECT.split())
    config.require("position_embedding_type", None, "absolute")
    config.require("is_decoder", None, False)
    config.require("is_causal", False)
    num_heads, num_kv_heads = config.heads()
    hidden_size = config.count("hidden_size")
    if num_kv_heads != num_heads or hidden_size % num_heads:
        raise UnsupportedModelError(
            f"expected {num_heads} heads of queries and keys that share {hidden_size} features, got {num_kv_heads}"
        )
    head_dim = hidden_size // num_heads
    return EncoderDefinition(
        num_tokens=config.count("vocab_size"),
        num_positions=config.count("max_position_embeddings"),
        num_segments=config.count("type_vocab_size", 2),
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size"),
        num_layers=config.num_layers(),
        spec=SoftmaxSpec(num_heads, num_heads, head_dim, head_dim**-0.5),
        activation=_ACTIVATIONS[config.choice("hidden_act", tuple(_ACTIVATIONS), "gelu")],
        norm_epsilon=config.positive("layer_norm_eps", 1e-12),
    )
