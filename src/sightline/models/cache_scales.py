"""Reads the scales for an 8-bit cache from a checkpoint: one number per layer for keys and one for values.

Owns the names under which scales are published, and the defaults for missing ones. Does not know pools.

    model.layers.N.self_attn.k_scale                  and v_scale
    model.layers.N.self_attn.attn.k_scale             and v_scale; mla_attn in place of attn
    model.layers.N.self_attn.k_proj.k_scale           and v_proj.v_scale; qkv_proj for both
    model.layers.N.self_attn.k_proj.output_scale      and v_proj.output_scale
    model.layers.N.self_attn.kv_scale                 one for keys and values
    model.layers.N.self_attn.q_scale, prob_scale, …   for 8-bit products, which are not used here
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sightline.attention.groups import LayerGroup
from sightline.cache.spec import SCALED_DTYPES, ScalesByPlane
from sightline.core.errors import CheckpointError
from sightline.models.weights import WeightReader

_NAME = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\.(?:"
    r"(?:attn\.|qkv_proj\.|(?:mla_attn\.)*|[qkv]_proj\.)(?P<what>k|v|kv|q|prob)_scale"
    r"|(?P<projection>[qkv])_proj\.output_scale|prob_output_scale)"
)
_SOURCES = {"k": ("k", "kv"), "v": ("v", "kv"), "entry": ("kv", "k")}
"""For each plane of the cache, which scale it uses: the first that the checkpoint has."""
_NEUTRAL = 1.0


@dataclass(frozen=True)
class _StoredScale:
    """A tensor that holds a scale."""

    name: str
    layer: int
    what: str
    """`k`, `v` or `kv`; anything else is not a cache scale."""


def load_cache_scales(
    weights: WeightReader, groups: Sequence[LayerGroup], cache_dtype: torch.dtype
) -> ScalesByPlane | None:
    """The scales by plane and layer. A scale that the checkpoint lacks is 1, and the ledger says so.

    Returns None if the cache stores unscaled values. Then the checkpoint's scales are not read, which is noted.
    """
    found = list(_find(weights.names))
    if cache_dtype not in SCALED_DTYPES:
        weights.leave_tensors(
            [scale.name for scale in found],
            "cache scales",
            "the cache stores values unscaled, so nothing is lost; kv_cache_dtype fp8 would use them",
        )
        return None
    weights.leave_tensors(
        [scale.name for scale in found if scale.what not in ("k", "v", "kv")],
        "8-bit attention",
        "they scale queries and weights, which are not quantised here, so nothing is lost",
    )
    stored: dict[int, dict[str, float]] = defaultdict(dict)
    for scale in found:
        if scale.what in ("k", "v", "kv"):
            if scale.what in stored[scale.layer]:
                raise CheckpointError(
                    f"expected one {scale.what} scale of layer {scale.layer}, got another, {scale.name}; "
                    "the checkpoint contradicts itself: use another"
                )
            stored[scale.layer][scale.what] = _positive(scale.name, weights.number(scale.name))
    return _by_plane(weights, groups, stored)


def leave_cache_scales(weights: WeightReader, within: Sequence[str]) -> None:
    """Skips the scales of a network that drafts, whose names begin so: its cache has the scale 1."""
    own = tuple(within)
    weights.leave_tensors(
        [scale.name for scale in _find(weights.names) if scale.name.startswith(own)],
        "cache scales of a drafter",
        "its cache has the scale 1; guesses may be right less often, and the answers are the same",
    )


def _find(names: Iterable[str]) -> Iterable[_StoredScale]:
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None:
            yield _StoredScale(name, int(match["layer"]), match["what"] or match["projection"] or "prob")


def _positive(name: str, number: float) -> float:
    if not (math.isfinite(number) and number > 0.0):
        raise CheckpointError(f"expected {name} to be a number above 0, got {number}; use another checkpoint")
    return number


def _by_plane(
    weights: WeightReader, groups: Sequence[LayerGroup], stored: Mapping[int, Mapping[str, float]]
) -> ScalesByPlane:
    """The scales that the groups' planes need, by model layer; the ledger says which are missing.

    Layers that borrow entries have none, and index keys have scales of their own, one for each token.
    """
    num_layers = 1 + max(layer for group in groups for layer in group.layers)
    scales: dict[str, list[float]] = {}
    missing, num_read = [], 0
    for group in (each for each in groups if each.loan is None and not each.chooses):
        for plane in (plane for pool in group.spec.pools(1, torch.float32) for plane in pool.planes):
            by_layer = scales.setdefault(plane.name, [_NEUTRAL] * num_layers)
            for layer in group.layers:
                own = [stored[layer][what] for what in _SOURCES[plane.name] if what in stored.get(layer, {})]
                by_layer[layer] = own[0] if own else _NEUTRAL
                missing += [] if own else [f"{plane.name} of layer {layer}"]
            num_read += len(group.layers)
    if missing:
        weights.degrade(
            "cache scales",
            f"{len(missing)} of {num_read} are taken as 1, that of the {missing[0]} among them: "
            "the checkpoint has none",
            "use a checkpoint with scales of its cache, or a wider kv_cache_dtype, if answers suffer",
        )
    return scales
