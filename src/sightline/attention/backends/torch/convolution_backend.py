"""Convolutions with torch alone, all rows at once, in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sightline.attention.backends.torch.rows import CONVOLUTION_ROWS
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    ConvolutionInputs,
    Lse,
    StepView,
)
from sightline.attention.recurrent.convolution import convolve, convolve_few
from sightline.attention.recurrent.layout import LayoutMaker, PlaceList, ShortRows, Windows
from sightline.attention.recurrent.segments import long_rows, short_tiles
from sightline.attention.spec import ConvolutionSpec


@dataclass(frozen=True, eq=False)
class _ShortRun:
    """Rows of a few tokens each, all of the same length."""

    width: int
    rows: ShortRows

    def __call__(self, inputs: ConvolutionInputs, plane: Tensor | None, out: Tensor) -> None:
        x = self.rows.of(inputs.x)
        tails = self.rows.tails(plane, x.shape[2], self.width)
        found, window = convolve_few(tails, x, inputs.conv, activated=False)
        self.rows.keep_tails(plane, window, self.width)
        self.rows.tokens.put(out, found.flatten(0, 1).unsqueeze(1))


@dataclass(frozen=True, eq=False)
class _LongRun:
    """Rows of any lengths."""

    width: int
    windows: Windows
    results: PlaceList | None
    """The tokens in what is computed; None for all of it."""
    read_slots: Tensor | None
    """[rows] int64; None if all begin with an empty tail."""

    def __call__(self, inputs: ConvolutionInputs, plane: Tensor | None, out: Tensor) -> None:
        tails = None if plane is None or self.read_slots is None else plane.index_select(0, self.read_slots)
        window = self.windows.fill(inputs.x, tails, self.width)
        if plane is not None:
            self.windows.keep(plane, window, self.width)
        found = convolve(window, inputs.conv, activated=False).flatten(0, 1)
        found = found if self.results is None else self.results.of(found)
        self.windows.tokens.put(out, found.unsqueeze(1))


@dataclass(frozen=True, eq=False)
class _ConvolutionPlan(AttentionPlan[ConvolutionInputs]):
    tails: tuple[Tensor, ...] | None
    """Per layer: [slots, channels, width - 1]; None under `TRANSIENT`."""
    runs: tuple[_ShortRun | _LongRun, ...]

    def prepare(self) -> None:
        """Nothing to do: everything was built on the host."""

    def run(self, layer: int, inputs: ConvolutionInputs, out: Tensor) -> Lse | None:
        plane = None if self.tails is None else self.tails[layer]
        for each in self.runs:
            each(inputs, plane, out)
        return None


class TorchConvolutionBackend(AttentionBackend[ConvolutionSpec, ConvolutionInputs]):
    """Serves convolutions by default where no compiled kernel does."""

    capabilities: ClassVar[tuple[Capability, ...]] = CONVOLUTION_ROWS

    def __init__(self, context: BackendContext[ConvolutionSpec]) -> None:
        self._width = context.spec.width
        self._device = context.device
        self._most_rows = context.limits.max_rows
        self._tails = context.cache.states.plane("tail").unbind(0)

    def plan(self, step: StepView, buffers: PlanBuffers) -> _ConvolutionPlan:
        del buffers
        lens, states = step.batch.query_lens.exact(), step.states
        maker = LayoutMaker(states, self._device)
        runs: list[_ShortRun | _LongRun] = [
            _ShortRun(self._width, maker.short_rows(tile.rows)) for tile in short_tiles(lens, self._most_rows)
        ]
        rows = long_rows(lens)
        if rows:
            windows = maker.windows(rows, self._width)
            results = None if windows.length is not None else maker.places(rows, self._width - 1)
            runs.append(_LongRun(self._width, windows, results, maker.read_slots(rows)))
        return _ConvolutionPlan(None if states is None else self._tails, tuple(runs))
