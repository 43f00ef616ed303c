"""Recurrent layers with torch alone: see `attention.recurrent` for the two ways to compute a row.

Computes in fp32. Rows go through in tiles, whose states fit a leased scratch, because the states of a step are never
changed in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sightline.attention.backends.torch.rows import RECURRENT_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    Lse,
    RecurrentInputs,
    StepView,
)
from sightline.attention.recurrent.layout import LayoutMaker
from sightline.attention.recurrent.planes import LayerStates, states_by_layer
from sightline.attention.recurrent.run import LongRun, ShortRun
from sightline.attention.recurrent.segments import LongTile, long_tiles, short_tiles
from sightline.attention.spec import RecurrentSpec


@dataclass(frozen=True, eq=False)
class _RecurrentPlan(AttentionPlan[RecurrentInputs]):
    layers: tuple[LayerStates, ...] | None
    """None under `TRANSIENT`."""
    scratch: Tensor
    """[rows, num_heads, key_dim, value_dim] fp32."""
    runs: tuple[ShortRun | LongRun, ...]

    def prepare(self) -> None:
        """Nothing to do: everything was built on the host."""

    def run(self, layer: int, inputs: RecurrentInputs, out: Tensor) -> Lse | None:
        states = None if self.layers is None else self.layers[layer]
        for each in self.runs:
            each(inputs, states, self.scratch, out)
        return None


class TorchRecurrentBackend(AttentionBackend[RecurrentSpec, RecurrentInputs]):
    """Serves recurrent layers by default where no compiled kernel does."""

    capabilities: ClassVar[tuple[Capability, ...]] = RECURRENT_ROWS
    chunk: ClassVar[int] = 64
    """Tokens of a chunk: enough for products to be worth their calls, few enough for the triangular system to be
    small."""
    scratch_bytes: ClassVar[int] = 64 << 20
    """States that are computed at once."""
    in_place_bytes: ClassVar[int] = 64 << 10
    """States of at least this size are worth a call of their own on a CPU if that saves copying them."""

    def __init__(self, context: BackendContext[RecurrentSpec]) -> None:
        self._spec = spec = context.spec
        self._device = context.device
        self._layers = states_by_layer(spec, context.cache.states)
        shape = (spec.num_heads, spec.key_dim, spec.value_dim)
        num_bytes = 4 * torch.Size(shape).numel()
        self._in_place = context.device.type == "cpu" and num_bytes >= self.in_place_bytes
        self._most_rows = max(1, min(context.limits.max_rows, self.scratch_bytes // num_bytes))
        self._scratch = {
            lane: context.workspace.lease(context.group, "states", lane, (self._most_rows, *shape), torch.float32)
            for lane in context.limits.lanes
        }

    def plan(self, step: StepView, buffers: PlanBuffers) -> _RecurrentPlan:
        del buffers
        lens, states = step.batch.query_lens.exact(), step.states
        maker = LayoutMaker(states, self._device)
        runs: list[ShortRun | LongRun] = []
        for short in short_tiles(lens, self._most_rows):
            in_place = maker.in_place(short.rows) if self._in_place else None
            runs.append(ShortRun(self._spec, maker.short_rows(short.rows), in_place))
        runs += [
            self._plan_long(tile, maker) for tile in long_tiles(lens, maker.kept_host(), self.chunk, self._most_rows)
        ]
        layers = None if states is None else self._layers
        return _RecurrentPlan(layers, self._scratch[step.lane], tuple(runs))

    def _plan_long(self, tile: LongTile, maker: LayoutMaker) -> LongRun:
        width = self._spec.conv_width
        windows = maker.windows(tile.rows, width) if width else None
        gap = 0 if windows is None or windows.length is not None else width - 1
        return LongRun(
            spec=self._spec,
            num_rows=len(tile.rows),
            tokens=maker.tokens(tile.rows),
            windows=windows,
            read_slots=maker.read_slots(tile.rows),
            blocks=maker.blocks(tile, gap, self._most_rows, even=self._spec.channel_decay),
        )
