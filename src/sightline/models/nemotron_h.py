"""Nemotron-H and Nemotron 3: every layer is one of Mamba-2, attention, a feed-forward or experts alone, behind a norm.

Attention knows no positions. Feed-forwards square a ReLU and have no gate.

The time of a token is limited by `time_step_limit`, as in NVIDIA's own code, in every step. transformers 5.22 instead
limits it from below by `time_step_min`, and only in steps of several tokens.
"""

from __future__ import annotations

from dataclasses import replace

from sightline.attention.spec import SoftmaxSpec
from sightline.core.errors import UnsupportedModelError
from sightline.layers.activation import Activation
from sightline.layers.routing import Score, Share
from sightline.models.attention import AbsentAttentionDefinition, AttentionTensors, SoftmaxAttentionDefinition
from sightline.models.config_reader import MAX_LAYERS, ConfigReader
from sightline.models.decoder import DecoderDefinition
from sightline.models.feed_forward import (
    AbsentFeedForward,
    ExpertFeedForward,
    ExpertStorage,
    FeedForward,
    NarrowInputs,
    SelfGatedFeedForward,
)
from sightline.models.grouped_experts import expert_groups, grouped_routing
from sightline.models.hybrid_config import PREDICTORS
from sightline.models.layer_definition import LayerDefinition
from sightline.models.mamba_config import KINDS, mamba_spec, time_limits
from sightline.models.recurrent.mamba import MambaDefinition
from sightline.models.shared_config import FULL, LINEAR

MLP, EXPERTS = "mlp", "moe"
_LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}
_OTHER_NAMES = {
    "head_dim": ("attention_head_dim",),
    "layer_norm_epsilon": ("norm_eps", "rms_norm_eps"),
    "layers_block_type": ("layer_types",),
    "n_groups": ("mamba_n_groups",),
    "conv_kernel": ("mamba_d_conv",),
    "use_conv_bias": ("mamba_conv_bias",),
    "time_step_limit": ("mamba_dt_limit",),
}
_FOR_TRAINING = """
    chunk_size expand mamba_chunk_size mamba_dt_init_floor mamba_dt_max mamba_dt_min mamba_expand mamba_proj_bias
    mamba_ssm_cache_dtype moe_shared_expert_overlap mtp_hybrid_override_pattern mtp_layers_block_type
    num_logits_to_keep num_nextn_predict_layers output_router_logits rescale_prenorm_residual time_step_floor
    time_step_max use_mamba_kernels
"""
_EXPERT_FIELDS = """
    moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size n_group n_routed_experts n_shared_experts
    norm_topk_prob num_experts_per_tok routed_scaling_factor topk_group
"""
_MAMBA_FIELDS = """
    conv_kernel mamba_head_dim mamba_num_heads n_groups ssm_state_size time_step_limit use_bias use_conv_bias
"""


def nemotron_h(config: ConfigReader) -> DecoderDefinition:
    """Reads a Nemotron-H or Nemotron 3 config."""
    config.also_called(_OTHER_NAMES)
    config.informational(*_FOR_TRAINING.split())
    for name, *neutral in (
        ("quantization_config", None),
        ("mamba_hidden_act", "silu"),
        ("mlp_hidden_act", "relu2"),
        ("attention_bias", None, False),
        ("residual_in_fp32", None, False),
        ("sliding_window", None),
    ):
        config.require(name, *neutral)
    config.may_idle("the time of a token is limited by time_step_limit alone, in every step", "time_step_min")
    config.may_idle(
        "attention knows no positions", "partial_rotary_factor", "rope_parameters", "rope_scaling", "rope_theta"
    )
    kinds = _kinds(config)
    parts = {kind: _part(config, kind) for kind in kinds}
    return DecoderDefinition(
        num_tokens=config.count("vocab_size"),
        num_positions=config.count("max_position_embeddings"),
        hidden_size=config.count("hidden_size"),
        layers=tuple(parts[kind] for kind in kinds),
        norm_epsilon=config.positive("layer_norm_epsilon", 1e-5),
        tied_embedding=config.boolean("tie_word_embeddings", default=False),
        beside=(PREDICTORS,),
    )


def _kinds(config: ConfigReader) -> tuple[str, ...]:
    """The kind of each layer: from `layers_block_type`, or the letters of `hybrid_override_pattern`."""
    for kind, fields in ((LINEAR, _MAMBA_FIELDS), (EXPERTS, _EXPERT_FIELDS), (MLP, "intermediate_size")):
        config.may_idle(f"no layer is {kind}", *fields.split())
    config.may_idle(f"no layer is {FULL}", "head_dim", "num_attention_heads", "num_key_value_heads")
    config.may_idle(f"no layer is {MLP} or {EXPERTS}", "mlp_bias")
    config.may_idle("layers_block_type lists the kinds", "hybrid_override_pattern")
    listed = config.optional_list("layers_block_type")
    if listed is None:
        pattern = config.text("hybrid_override_pattern")
        kinds = tuple(_LETTERS.get(letter, letter) for letter in pattern)
    else:
        kinds = tuple(KINDS.get(str(kind), str(kind)) for kind in listed)
    unknown = set(kinds) - set(_LETTERS.values())
    if unknown or not 0 < len(kinds) <= MAX_LAYERS:
        raise UnsupportedModelError(
            f"expected from 1 to {MAX_LAYERS} layers of {', '.join(_LETTERS.values())}, in hybrid_override_pattern as "
            f"{' '.join(_LETTERS)}, got {len(kinds)} with {', '.join(sorted(unknown)) or 'none'} among them"
        )
    config.require("num_hidden_layers", None, len(kinds))
    return kinds


def _part(config: ConfigReader, kind: str) -> LayerDefinition:
    """A layer of this kind."""
    if kind == LINEAR:
        return LayerDefinition(_mamba(config), None, AbsentFeedForward(), has_one_part=True)
    if kind == FULL:
        return LayerDefinition(_attention(config), None, AbsentFeedForward(), has_one_part=True)
    return LayerDefinition(AbsentAttentionDefinition(), None, _feed_forward(config, kind), has_one_part=True)


def _mamba(config: ConfigReader) -> MambaDefinition:
    groups = config.count("n_groups", 8)
    spec = mamba_spec(
        num_heads=config.count("mamba_num_heads", 128),
        num_groups=groups,
        head_dim=config.count("mamba_head_dim", 64),
        state_size=config.count("ssm_state_size", 128),
        conv_width=config.count("conv_kernel", 4),
    )
    return MambaDefinition(
        spec,
        norm_epsilon=config.positive("layer_norm_epsilon", 1e-5),
        norm_groups=groups,
        time_limits=time_limits(config),
        bias=config.boolean("use_bias", default=False),
        conv_bias=config.boolean("use_conv_bias", default=True),
    )


def _attention(config: ConfigReader) -> SoftmaxAttentionDefinition:
    num_heads, num_kv_heads = config.heads()
    head_dim = config.count("head_dim", 128)
    spec = SoftmaxSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5)
    return SoftmaxAttentionDefinition(spec, AttentionTensors(rotates=False))


def _feed_forward(config: ConfigReader, kind: str) -> FeedForward:
    bias = config.boolean("mlp_bias", default=False)
    if kind == MLP:
        return SelfGatedFeedForward(config.count("intermediate_size"), Activation.RELU, bias)
    config.require("n_shared_experts", None, 1)
    share = Share.OF_CHOSEN if config.boolean("norm_topk_prob", default=True) else Share.OF_ALL
    groups = expert_groups(config.count("n_group", 1), config.count("topk_group", 1), ranked_by=2)
    routing = grouped_routing(config, share, Score.SIGMOID, groups, experts_per_token=2, scale=1.0)
    narrow = config.optional_count("moe_latent_size")
    shared = config.count("moe_shared_expert_intermediate_size", 7688)
    return ExpertFeedForward(
        intermediate_size=config.count("moe_intermediate_size", 7688),
        routing=replace(routing, corrected=True),
        gate=Activation.RELU,
        storage=ExpertStorage.SEPARATE,
        gates_itself=True,
        narrow=None if narrow is None else NarrowInputs(narrow, bias),
        shared=SelfGatedFeedForward(shared, Activation.RELU, bias),
    )
