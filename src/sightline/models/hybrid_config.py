"""Reading of the config fields that hybrids share: kinds of layers, experts, the heads of Kimi delta attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from sightline.attention.spec import RecurrentSpec
from sightline.core.errors import UnsupportedModelError
from sightline.models.config_reader import ConfigReader
from sightline.models.decoder import BesideTensors
from sightline.models.shared_config import FULL, LINEAR

MAX_SIZE = 2**16
"""The limit for sizes of recurrent heads: a config with more is broken or hostile."""
EXPERT_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "max_position_embeddings": ("model_max_length",),
        "n_group": ("num_expert_group",),
        "n_routed_experts": ("num_experts", "num_local_experts"),
        "n_shared_experts": ("num_shared_experts",),
        "norm_topk_prob": ("moe_renormalize",),
        "num_experts_per_tok": ("num_experts_per_token",),
    }
)
"""Other names of fields, by the name that DeepSeek uses."""
PREDICTORS = BesideTensors(
    "mtp.",
    "multi-token prediction",
    "drafting with the layers of this family is not supported yet; the answers are the same without them",
)


def hybrid_kinds(config: ConfigReader, unlisted: Callable[[int], str]) -> tuple[str, ...]:
    """`FULL` or `LINEAR` for each layer: from `layer_types`, or else by the layer's index."""
    listed = config.optional_kinds("layer_types", (FULL, LINEAR))
    return listed or tuple(unlisted(index) for index in range(config.num_layers()))


def delta_spec(num_heads: int, head_dim: int, conv_width: int) -> RecurrentSpec:
    """Kimi delta attention with heads of one size."""
    try:
        return RecurrentSpec(
            num_heads=num_heads,
            num_key_heads=num_heads,
            key_dim=head_dim,
            value_dim=head_dim,
            scale=head_dim**-0.5,
            delta_rule=True,
            channel_decay=True,
            unit_keys=True,
            conv_width=conv_width,
        )
    except ValueError as error:
        raise UnsupportedModelError(f"recurrent layers: {error}") from error
