"""MiniMax 01: lightning attention, softmax attention in some layers, and experts in all.

Each part of a layer adds to the norm that it reads, not to the stream before the norm, with a factor on both.
"""

from __future__ import annotations

from sightline.attention.spec import RecurrentSpec, SoftmaxSpec
from sightline.core.errors import UnsupportedModelError
from sightline.layers.activation import Activation
from sightline.layers.routing import Share
from sightline.models.attention import SoftmaxAttentionDefinition
from sightline.models.config_reader import ConfigReader
from sightline.models.decoder import DecoderDefinition
from sightline.models.feed_forward import ExpertFeedForward, ExpertStorage
from sightline.models.hybrid_config import hybrid_kinds
from sightline.models.layer_definition import LayerDefinition, ResidualFactors
from sightline.models.norms import NormDefinition
from sightline.models.recurrent.lightning import LightningDefinition, depth_of
from sightline.models.shared_config import FULL, LINEAR, one_rotary, read_routing

_THETA = 1_000_000.0
_MOST = 1e4
"""The limit for factors of residual connections, far above any real model."""
_OUTPUT_NORM = NormDefinition(1e-6)
"""The norm of a lightning layer's output. Its epsilon does not come from the config."""
_FULL_FIELDS = "full_attn_alpha_factor full_attn_beta_factor num_key_value_heads sliding_window"
_ROPE_FIELDS = "rope_parameters rope_scaling rope_theta"
_LINEAR_FIELDS = "linear_attn_alpha_factor linear_attn_beta_factor"


def minimax(config: ConfigReader) -> DecoderDefinition:
    """Reads a config of MiniMax 01."""
    # The block size decides how the recurrence is cut, which does not change its result.
    config.informational("block_size", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
    config.require("hidden_act", "silu")
    config.require("quantization_config", None)
    kinds = hybrid_kinds(config, lambda index: LINEAR if index % 2 else FULL)
    num_heads, num_kv_heads = config.heads()
    hidden_size, num_positions = config.count("hidden_size"), config.count("max_position_embeddings")
    head_dim = config.count("head_dim", hidden_size // num_heads, null_is_default=True)
    rotary = one_rotary(config, head_dim, num_positions, _THETA)
    config.may_idle("no layer has softmax attention", *_FULL_FIELDS.split(), *_ROPE_FIELDS.split())
    config.may_idle("no layer has lightning attention", *_LINEAR_FIELDS.split())
    window = config.optional_count("sliding_window")
    softmax = SoftmaxAttentionDefinition(
        SoftmaxSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5, window),
    )
    experts = ExpertFeedForward(
        intermediate_size=config.count("intermediate_size"),
        routing=read_routing(config, Share.OF_CHOSEN, num_experts=8, experts_per_token=2),
        gate=Activation.SILU,
        storage=ExpertStorage.SEPARATE,
    )
    factors = {kind: _residual(config, name) for kind, name in {FULL: "full_attn", LINEAR: "linear_attn"}.items()}
    return DecoderDefinition(
        num_tokens=config.count("vocab_size"),
        num_positions=num_positions,
        hidden_size=hidden_size,
        layers=tuple(
            LayerDefinition(softmax, rotary, experts, residual=factors[kind])
            if kind == FULL
            else LayerDefinition(
                LightningDefinition(_lightning(num_heads, head_dim), depth_of(index, len(kinds)), _OUTPUT_NORM),
                None,
                experts,
                residual=factors[kind],
            )
            for index, kind in enumerate(kinds)
        ),
        norm_epsilon=config.positive("rms_norm_eps", 1e-5),
        tied_embedding=config.boolean("tie_word_embeddings", default=False),
    )


def _lightning(num_heads: int, head_dim: int) -> RecurrentSpec:
    return RecurrentSpec(
        num_heads=num_heads,
        num_key_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        scale=1.0,
        delta_rule=False,
        channel_decay=False,
        unit_keys=False,
        conv_width=0,
    )


def _residual(config: ConfigReader, kind: str) -> ResidualFactors:
    return ResidualFactors(
        attention_kept=_factor(config, f"{kind}_alpha_factor"),
        attention_added=_factor(config, f"{kind}_beta_factor"),
        feed_forward_kept=_factor(config, "mlp_alpha_factor"),
        feed_forward_added=_factor(config, "mlp_beta_factor"),
    )


def _factor(config: ConfigReader, name: str) -> float:
    """A factor whose square is far from the limits of fp32."""
    factor = config.positive(name, 1.0)
    if not 1.0 / _MOST <= factor <= _MOST:
        raise UnsupportedModelError(f"expected config field {name} from {1.0 / _MOST} to {_MOST}, got {factor}")
    return factor
