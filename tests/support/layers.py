"""Running one layer or one operation alone, on memory that starts as NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.layers.linear import Linear, Projection
from sightline.layers.mlp import GatedMlp
from sightline.layers.moe import Expert, ExpertMlp, SeparateExperts
from sightline.layers.operations import Operations, TurnedHeads
from sightline.layers.rotary import Halves, Rotary, RotarySpec, RotaryTable
from sightline.layers.scratch import Activations, Scratch, empty_rows
from sightline.layers.sink import Written
from sightline.layers.source import Given
from sightline.layers.torch_operations import TorchOperations

TORCH = TorchOperations()


def activations(max_tokens: int, dtype: torch.dtype = torch.float32, operations: Operations = TORCH) -> Activations:
    workspace = Workspace(torch.device("cpu"), 1 << 30, poison=True)
    return Activations(workspace, MAIN_LANE, max_tokens, dtype, operations, turns=operations.turns)


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
    mlp(Given(x), Written(out), scratch_for(x))
    return out


def make_table(
    spec: RotarySpec, positions: Tensor, dtype: torch.dtype = torch.float32, operations: Operations = TORCH
) -> RotaryTable:
    """The table for positions [num_tokens], on their device."""
    sizes = (spec.head_dim, spec.head_dim // 2, spec.head_dim // 2)
    cos, sin, minus_sin = (
        torch.full((len(positions), 1, size), torch.nan, dtype=dtype, device=positions.device) for size in sizes
    )
    table = RotaryTable(cos, sin, minus_sin)
    operations.rotary_table(Rotary(spec, positions.device), positions, table)
    return table


def rotate(table: RotaryTable, x: Tensor) -> Tensor:
    """The rotated heads of x [num_tokens, heads, head_dim]."""
    out = torch.full_like(x, torch.nan)
    TORCH.turn_heads(TurnedHeads(x, x[:, :0], Halves.of(x), Halves.of(out)), None, table)
    return out


def experts_of(mlp: ExpertMlp) -> tuple[Expert, ...]:
    assert isinstance(mlp.bank, SeparateExperts)
    return mlp.bank.experts


def dense(projection: Projection) -> Linear:
    assert isinstance(projection, Linear)
    return projection


def without_bias(projection: Projection) -> Linear:
    assert dense(projection).bias is not None, "there is a bias to leave out"
    return Linear(dense(projection).weight)
