"""Ragged rows of latent attention on Sightline's own Triton kernel, as a `VarlenKernel`.

Composed by backends whose library has no kernel for such rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.spec import LatentSpec
from sightline.kernels.triton.extend import extend_contiguous
from sightline.kernels.triton.extend_rules import CAUSAL_ROWS, FULL_ROWS, ExtendMasks, ScoreRule
from sightline.kernels.triton.extend_tiles import (
    FIELDS,
    ExtendConfig,
    Tiles,
    choose_config,
    num_tiles,
    prepare_ragged_tiles,
)


@dataclass(frozen=True, eq=False)
class _ExtendCall:
    """Implements `VarlenCall`."""

    spec: LatentSpec
    tiles: Tiles
    config: ExtendConfig
    masks: ExtendMasks

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        rule = ScoreRule(self.spec.scale)
        extend_contiguous(q, k, v, self.tiles, out, rule=rule, masks=self.masks, config=self.config, lse=lse)
        return lse


@dataclass(frozen=True, eq=False)
class ExtendKernel:
    """Implements `VarlenKernel`."""

    spec: LatentSpec
    dtype: torch.dtype
    shared_bytes: int
    """Shared memory available to one program."""

    def plan(
        self, name: str, query_lens: Sequence[int], key_lens: Sequence[int], *, causal: bool, buffers: PlanBuffers
    ) -> _ExtendCall:
        spec, rows, tokens = self.spec, len(query_lens), sum(query_lens)
        config = choose_config(
            self.dtype,
            spec.nope_dim + spec.rope_dim,
            spec.value_dim,
            1,
            max(query_lens),
            shared_bytes=self.shared_bytes,
        )
        offsets = buffers.take(f"{name}.offsets", (2, rows + 1), torch.int64)
        lens = torch.tensor([[0, *query_lens], [0, *key_lens]], dtype=torch.int64)
        offsets.copy_(lens.cumsum(1), non_blocking=True)
        tile_tokens = config.tile_tokens(1)
        records = buffers.take(f"{name}.tiles", (num_tiles(rows, tokens, tile_tokens), FIELDS), torch.int32)
        tiles = Tiles(records, tile_tokens)
        prepare_ragged_tiles(offsets[0], offsets[1], tokens, tiles)
        return _ExtendCall(spec, tiles, config, CAUSAL_ROWS if causal else FULL_ROWS)
