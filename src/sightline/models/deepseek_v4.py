"""DeepSeek V4: one key head over a window of tokens and compressed entries, several residual streams, and experts in
every layer, of which the first layers look theirs up by token.

Layers are of three kinds. All attend to a window; two also attend to entries that stand for a few tokens each, chosen
by an indexer, or for many. A config names the kinds in `layer_types`, or gives the tokens per entry of each layer in
`compress_ratios`, where 0 means no entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sightline.attention.compressed.spec import CompressedIndexSpec, CompressedSpec, Compression
from sightline.core.errors import UnsupportedModelError
from sightline.layers.activation import ClampedSilu
from sightline.layers.rotary import RotarySpec
from sightline.layers.routing import Routing, Score, Share
from sightline.layers.stream_mix import StreamRule
from sightline.models.compressed import CompressedAttentionDefinition, CompressedIndexerDefinition
from sightline.models.config_reader import MAX_LAYERS, ConfigReader
from sightline.models.decoder import DecoderDefinition
from sightline.models.feed_forward import DenseFeedForward, ExpertFeedForward, ExpertStorage
from sightline.models.grouped_experts import CORRECTED
from sightline.models.hybrid_config import PREDICTORS
from sightline.models.layer_definition import LayerDefinition
from sightline.models.norms import NormDefinition
from sightline.models.rope_config import rotary_spec, same_type_key, state_once

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
"""The kinds of layers: without entries, with entries that an indexer chooses, and with all entries."""
KINDS = (WINDOW, SPARSE, HEAVY)
LISTED, ROUTED = "hash_moe", "moe"
"""The values of `mlp_layer_types`: a table lists the experts of each token, or a router chooses them."""
MAIN, COMPRESS = "main", "compress"
"""The two rotations: of layers without entries, and of the others."""
_RATIOS = {SPARSE: 4, HEAVY: 128}
_RATIO_FIELDS = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
_OTHER_NAMES = {"n_routed_experts": ("num_local_experts",), "moe_intermediate_size": ("intermediate_size",)}
_WITHOUT_EFFECT = """
    expert_dtype num_nextn_predict_layers output_router_logits router_aux_loss_coef router_jitter_noise
"""
_INDEX_FIELDS = "index_head_dim index_n_heads index_topk"
_UNUSED_ROPE = "no layer has this rotation, or this kind of rotary embedding does not use it"


def deepseek_v4(config: ConfigReader) -> DecoderDefinition:
    """Reads a config of DeepSeek V4."""
    config.also_called(_OTHER_NAMES)
    config.informational(*_WITHOUT_EFFECT.split())
    for name, *neutral in (
        ("hidden_act", "silu"),
        ("quantization_config", None),
        ("attention_bias", None, False),
        ("mlp_bias", None, False),
        ("num_key_value_heads", None, 1),
        ("n_shared_experts", None, 1),
        ("norm_topk_prob", None, True),
        ("scoring_func", None, "sqrtsoftplus"),
        ("topk_method", None, CORRECTED),
    ):
        config.require(name, *neutral)
    norms = NormDefinition(config.positive("rms_norm_eps", 1e-6))
    ratios = _ratios(config)
    kinds = _kinds(config, ratios)
    rope_dim = _rope_dim(config)
    attentions = {kind: _attention(config, kind, ratios, rope_dim, norms) for kind in kinds}
    rotaries = _rotaries(config, ratios, rope_dim)
    return DecoderDefinition(
        num_tokens=config.count("vocab_size"),
        num_positions=_num_positions(config),
        hidden_size=config.count("hidden_size"),
        layers=tuple(
            LayerDefinition(attentions[kind], rotaries[kind], feed_forward)
            for kind, feed_forward in zip(kinds, _feed_forwards(config), strict=True)
        ),
        norm_epsilon=norms.epsilon,
        tied_embedding=config.boolean("tie_word_embeddings", default=False),
        beside=(PREDICTORS,),
        streams=StreamRule(
            count=config.count("hc_mult", 4, most=MAX_LAYERS),
            num_rounds=config.count("hc_sinkhorn_iters", 20, most=MAX_LAYERS),
            epsilon=config.positive("hc_eps", 1e-6),
            norm_epsilon=norms.epsilon,
        ),
    )


def _num_positions(config: ConfigReader) -> int:
    return config.count("max_position_embeddings", 1 << 20)


def _ratios(config: ConfigReader) -> dict[str, int]:
    """The tokens per entry of each kind of layer: from `compress_rates`, or a field for each kind. 0 means no
    entries."""
    config.may_idle("no layer is of this kind", "compress_rates", *_RATIO_FIELDS.values())
    section = config.section("compress_rates", frozenset(_RATIOS))
    found = {WINDOW: 0}
    for kind, default in _RATIOS.items():
        ratio = section.count(kind, config.count(_RATIO_FIELDS[kind], default))
        config.require(_RATIO_FIELDS[kind], ratio)
        found[kind] = ratio
    if found[SPARSE] == found[HEAVY]:
        raise UnsupportedModelError(
            f"deepseek_v4: expected two different compress_rates, got {found[SPARSE]} for both kinds of layers"
        )
    return found


def _kinds(config: ConfigReader, ratios: Mapping[str, int]) -> tuple[str, ...]:
    """The kind of each layer."""
    num_layers = config.num_layers()
    listed, told = config.optional_kinds("layer_types", KINDS), config.optional_list("compress_ratios")
    if told is None:
        unlisted = (HEAVY, HEAVY, *(SPARSE if index % 2 else HEAVY for index in range(num_layers)))
        return listed or unlisted[:num_layers]
    by_ratio: dict[object, str] = {ratio: kind for kind, ratio in ratios.items()}
    # Behind the layers of the model are those for multi-token prediction.
    if len(told) < num_layers or not all(type(each) is int and each in by_ratio for each in told):
        raise UnsupportedModelError(
            f"deepseek_v4: expected compress_ratios of {num_layers} layers or more out of "
            f"{', '.join(map(str, by_ratio))}, got {told}"
        )
    kinds = tuple(by_ratio[each] for each in told[:num_layers])
    if listed not in (None, kinds):
        raise UnsupportedModelError(
            f"deepseek_v4: expected layer_types or compress_ratios, or both alike, got {listed} and {told}; remove the "
            "one that does not hold"
        )
    return kinds


def _attention(
    config: ConfigReader, kind: str, ratios: Mapping[str, int], rope_dim: int, norms: NormDefinition
) -> CompressedAttentionDefinition:
    """The attention of a kind of layers."""
    config.may_idle("no layer has an indexer", *_INDEX_FIELDS.split())
    head_dim = config.count("head_dim", 512)
    compression = None
    if kind != WINDOW:
        compression = Compression(ratios[kind], overlap=kind == SPARSE, rope_dim=rope_dim, norm_eps=norms.epsilon)
    spec = CompressedSpec(
        num_q_heads=config.count("num_attention_heads", 64, most=MAX_LAYERS),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=config.count("sliding_window", 128),
        compression=compression,
    )
    definition = CompressedAttentionDefinition(
        spec=spec,
        query_rank=config.count("q_lora_rank", 1024),
        num_groups=config.count("o_groups", 8, most=MAX_LAYERS),
        group_rank=config.count("o_lora_rank", 1024),
        norms=norms,
    )
    if kind != SPARSE or compression is None:
        return definition
    index = CompressedIndexSpec(
        num_q_heads=config.count("index_n_heads", 64, most=MAX_LAYERS),
        head_dim=config.count("index_head_dim", 128),
        top_k=config.count("index_topk", 512),
        compression=compression,
    )
    sparse = replace(spec, top_k=index.top_k)
    return replace(definition, spec=sparse, indexer=CompressedIndexerDefinition(index))


def _feed_forwards(config: ConfigReader) -> tuple[ExpertFeedForward, ...]:
    """The experts of each layer: listed by token where `mlp_layer_types` says so, or else in the first layers."""
    num_layers, size = config.num_layers(), config.count("moe_intermediate_size", 2048)
    limit = ClampedSilu(config.positive("swiglu_limit", 10.0))
    routing = Routing(
        num_experts=config.count("n_routed_experts", 256, most=MAX_LAYERS),
        experts_per_token=config.count("num_experts_per_tok", 6),
        share=Share.OF_CHOSEN,
        score=Score.SQRT_SOFTPLUS,
        corrected=True,
        scale=config.positive("routed_scaling_factor", 1.5),
    )
    routed = ExpertFeedForward(size, routing, limit, ExpertStorage.SEPARATE, shared=DenseFeedForward(size, limit))
    by_token = replace(routed, routing=replace(routing, corrected=False), listed_tokens=config.count("vocab_size"))
    kinds = {LISTED: by_token, ROUTED: routed}
    return tuple(kinds[kind] for kind in _expert_kinds(config, num_layers))


def _expert_kinds(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """`LISTED` or `ROUTED` for each layer."""
    listed = config.optional_kinds("mlp_layer_types", (LISTED, ROUTED))
    config.may_idle("mlp_layer_types lists the layers, or there are no more", "num_hash_layers")
    count = config.count("num_hash_layers", 3, least=0)
    kinds = tuple(LISTED if index < count else ROUTED for index in range(num_layers))
    if listed is not None and "num_hash_layers" in config and listed != kinds:
        raise UnsupportedModelError(
            f"deepseek_v4: expected mlp_layer_types or num_hash_layers, or both alike, got {listed} and {count}; "
            "remove the one that does not hold"
        )
    return listed or kinds


def _rope_dim(config: ConfigReader) -> int:
    """The number of dimensions of a head that are rotated."""
    head_dim, share = config.count("head_dim", 512), config.optional_positive("partial_rotary_factor")
    told = config.optional_count("qk_rope_head_dim")
    rope_dim = told or int(head_dim * (0.125 if share is None else share))
    if share is not None and int(head_dim * share) != rope_dim:
        raise UnsupportedModelError(
            f"deepseek_v4: expected partial_rotary_factor or qk_rope_head_dim, or both alike, got {share} of "
            f"{head_dim} and {told}; remove the one that does not hold"
        )
    if rope_dim % 2 or not 2 <= rope_dim <= head_dim:
        raise UnsupportedModelError(
            f"deepseek_v4: expected an even number of rotated dimensions from 2 to {head_dim}, got {rope_dim}"
        )
    return rope_dim


def _rotaries(config: ConfigReader, ratios: Mapping[str, int], rope_dim: int) -> dict[str, RotarySpec]:
    """The rotary embedding of each kind of layer."""
    config.may_idle(_UNUSED_ROPE, "rope_theta", "compress_rope_theta", "rope_parameters", "rope_scaling")
    head_dim = config.count("head_dim", 512)
    specs = {}
    for name, section in _rope_sections(config).items():
        stated = section.pop("partial_rotary_factor", None)
        if stated is not None and not (isinstance(stated, (int, float)) and int(head_dim * stated) == rope_dim):
            raise UnsupportedModelError(
                f"deepseek_v4: expected partial_rotary_factor {rope_dim / head_dim} in rope_parameters.{name}, as "
                f"outside, got {stated!r}"
            )
        specs[name] = rotary_spec(section, rope_dim, 1.0, _num_positions(config))
    compressed = {kind: replace(specs[COMPRESS], window=ratios[kind]) for kind in (SPARSE, HEAVY)}
    return {WINDOW: specs[MAIN], **compressed}


def _rope_sections(config: ConfigReader) -> dict[str, dict[str, object]]:
    """The sections of the two rotations, with their bases.

    The newer form has both in `rope_parameters`. In the older one `rope_scaling`, or `rope_parameters`, is that of
    layers with entries; cosines and sines are then not multiplied by what YaRN derives from its factor.
    """
    bases = {MAIN: config.positive("rope_theta", 10_000.0), COMPRESS: config.positive("compress_rope_theta", 160_000.0)}
    fields = {MAIN: "rope_theta", COMPRESS: "compress_rope_theta"}
    older, newer = config.optional_section("rope_scaling"), config.optional_section("rope_parameters")
    if newer is not None and {MAIN, COMPRESS} & set(newer):
        if older is not None or set(newer) != {MAIN, COMPRESS}:
            raise UnsupportedModelError(
                f"deepseek_v4: expected rope_parameters of {MAIN} and {COMPRESS}, and no rope_scaling beside them, got "
                f"{', '.join(sorted(newer))} and {older}"
            )
        return {name: _nested(newer, name, fields[name], bases[name], config) for name in (MAIN, COMPRESS)}
    if older and newer and same_type_key(older) != same_type_key(newer):
        raise UnsupportedModelError(
            f"rope: expected rope_scaling or rope_parameters, or both alike, got {dict(older)} and {dict(newer)}; "
            "remove the one that does not hold"
        )
    scaled = dict(older or newer or {})
    # Tools copy the base of the other layers here.
    scaled.pop("rope_theta", None)
    if same_type_key(scaled)["rope_type"] == "yarn":
        scaled.setdefault("attention_factor", 1.0)
    return {MAIN: {"rope_theta": bases[MAIN]}, COMPRESS: {**scaled, "rope_theta": bases[COMPRESS]}}


def _nested(
    sections: Mapping[str, object], name: str, field: str, base: float, config: ConfigReader
) -> dict[str, object]:
    """One section of the newer form. Raises if it states no base, or another one than the config beside it."""
    section = sections[name]
    if not isinstance(section, Mapping):
        raise UnsupportedModelError(f"deepseek_v4: expected rope_parameters.{name} to be an object, got {section!r}")
    found = dict(section)
    if "rope_theta" not in found:
        raise UnsupportedModelError(f"deepseek_v4: expected rope_theta in rope_parameters.{name}, got none; set it")
    if field in config:
        state_once(found, "rope_theta", base, field)
    return found
