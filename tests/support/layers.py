"""Running one layer alone, on memory that starts as NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.layers.linear import Linear, Projection
from sightline.layers.mlp import GatedMlp
from sightline.layers.moe import ExpertMlp
from sightline.layers.scratch import Activations, Scratch, empty_rows
from sightline.layers.sink import Written


def activations(max_tokens: int, dtype: torch.dtype = torch.float32) -> Activations:
    return Activations(Workspace(torch.device("cpu"), 1 << 30, poison=True), MAIN_LANE, max_tokens, dtype)


def scratch_for(x: Tensor) -> Scratch:
    return activations(x.shape[0], x.dtype).shaped(x.shape[0])


def project(projection: Projection, x: Tensor) -> Tensor:
    """The projection of x, in the memory order that its rows prefer."""
    out = empty_rows(x.shape[0], projection.out_features, x, turns=True).fill_(torch.nan)
    projection(x, out)
    return out


def feed(mlp: GatedMlp | ExpertMlp, x: Tensor) -> Tensor:
    """What a feed-forward of either kind gives for x [num_tokens, hidden]."""
    out = empty_rows(x.shape[0], x.shape[1], x, turns=True).fill_(torch.nan)
    mlp(x, Written(out), scratch_for(x))
    return out


def dense(projection: Projection) -> Linear:
    assert isinstance(projection, Linear)
    return projection


def without_bias(projection: Projection) -> Linear:
    assert dense(projection).bias is not None, "there is a bias to leave out"
    return Linear(dense(projection).weight)
