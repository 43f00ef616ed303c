"""Reading of the config fields of sparse latent attention, which DeepSeek V3.2 and GLM-5 name alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from sightline.attention.spec import IndexSpec
from sightline.core.errors import UnsupportedModelError
from sightline.models.config_reader import MAX_LAYERS, ConfigReader
from sightline.models.decoder import DecoderDefinition
from sightline.models.grouped_experts import corrected_routing, read_experts, typed_expert_layers, with_predictors
from sightline.models.indexer import IndexerDefinition
from sightline.models.latent_config import LatentDefaults, latent_attention, latent_decoder
from sightline.models.shared_config import rope_section

FULL, SHARED = "full", "shared"
"""The values of `indexer_types`: a layer has an indexer, or takes the choice of the last one before it."""
ATTENTION, OLDER_NAME = "indexed_attention", "deepseek_sparse_attention"
"""The only value of `layer_types`, and its name before version 5.22 of transformers. A config has one of them."""
KEY_NORM_EPSILON = 1e-6
"""The epsilon of the layer norm of index keys. No config has it."""


class SparseDefaults(NamedTuple):
    """Values for fields that a config leaves out."""

    latent: LatentDefaults
    index_heads: int
    paired_neighbours: bool
    """True if the indexer's rotation pairs dimension 2i with 2i + 1."""
    num_groups: int
    groups_per_token: int


def sparse_decoder(config: ConfigReader, kinds: Sequence[str], defaults: SparseDefaults) -> DecoderDefinition:
    """Reads a decoder of sparse latent layers. `kinds` says which of them have an indexer."""
    config.require("rope_interleave", None, True)
    config.require("mlp_bias", None, False)
    config.require("moe_layer_freq", None, 1)
    is_older = OLDER_NAME in (config.optional_list("layer_types") or ())
    config.optional_kinds("layer_types", (OLDER_NAME if is_older else ATTENTION,))
    groups = {"num_groups": defaults.num_groups, "groups_per_token": defaults.groups_per_token}
    experts = read_experts(config, corrected_routing(config, **groups, scale=2.5), num_shared=1)
    rope = rope_section(config)
    dense = latent_attention(config, rope, paired_neighbours=True, defaults=defaults.latent)
    indexer = _indexer(config, dense.spec.rope_dim, defaults)
    full = replace(dense, spec=replace(dense.spec, top_k=indexer.spec.top_k), indexer=indexer)
    definition = latent_decoder(
        config,
        [full if kind == FULL else replace(full, indexer=None) for kind in kinds],
        typed_expert_layers(config, experts, first=3),
        rope,
        defaults=defaults.latent,
    )
    # Behind the last layer nothing is shared: a network for prediction runs without the layers before it.
    return with_predictors(config, definition, experts, attention=full)


def indexer_kinds(config: ConfigReader) -> tuple[str, ...]:
    """`FULL` or `SHARED` for each layer: listed, as a pattern, or every `index_topk_freq`-th layer."""
    unlisted = "indexer_types or index_topk_pattern lists the layers, or the same ones have an indexer"
    config.may_idle(unlisted, "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")
    listed = config.optional_kinds("indexer_types", (FULL, SHARED))
    pattern = config.optional_pattern("index_topk_pattern", {"F": FULL, "S": SHARED})
    step = config.count("index_topk_freq", 1)
    first = config.count("index_skip_topk_offset", 2, least=0)
    every = tuple(SHARED if max(layer - first + 1, 0) % step else FULL for layer in range(config.num_layers()))
    kinds = listed or pattern or every
    if kinds[0] != FULL:
        raise UnsupportedModelError(
            f"expected an indexer in layer 0 (indexer_types = {FULL}), got a layer that shares one; nothing was chosen "
            "before it"
        )
    return kinds


def _indexer(config: ConfigReader, rope_dim: int, defaults: SparseDefaults) -> IndexerDefinition:
    spec = IndexSpec(
        num_q_heads=config.count("index_n_heads", defaults.index_heads, most=MAX_LAYERS),
        head_dim=config.count("index_head_dim", 128),
        top_k=config.count("index_topk", 2048),
    )
    neighbours = config.boolean("indexer_rope_interleave", defaults.paired_neighbours)
    return IndexerDefinition(spec, rope_dim, neighbours, KEY_NORM_EPSILON)
