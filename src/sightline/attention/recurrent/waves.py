"""Computes recurrent layers with libraries that take ragged rows and return the state behind each row.

    our kernel      queries, keys and values: convolved, and of unit length where the spec says so
    gathered        the states that rows begin with, from their slots, in scratch memory
    the library     wave by wave: one segment of every row, which ends where a state is kept
    scattered       the states behind segments, to the slots that the step names

Most rows keep one state, behind their last token, so that most steps are one wave. The states of a row's next segment
are those that the library returned.

Some libraries read whole tiles, also behind the end of a segment, and multiply what is too much by 0. If that is NaN of
another row, so is the product. For them, keys and values that are not finite become 0, and the betas of their tokens
NaN, which spoils the row that they belong to, and no other.

Knows neither a library nor its capability rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import AttentionPlan, BackendContext, Lse, RecurrentInputs, StepView
from sightline.attention.recurrent.layout import Kept, LayoutMaker, PlaceList
from sightline.attention.recurrent.planes import LayerStates, states_by_layer
from sightline.attention.recurrent.planned_tokens import PlannedTokens
from sightline.attention.recurrent.run import first_state
from sightline.attention.recurrent.segments import LongTile, RowTokens, Segment, rows_of, tiles_of
from sightline.attention.spec import RecurrentSpec
from sightline.core.lengths import moved
from sightline.kernels.triton.short_convolution import Convolution, Split, split_mixed

SCRATCH_BYTES = 128 << 20
"""States that are computed at once."""


class Borders(NamedTuple):
    """Where the segments of a wave begin and end, among its tokens.

    Made anew for every plan: a library may remember what it derives from them by the identity of these tensors.
    """

    device: Tensor
    """[segments + 1] int64."""
    host: Tensor
    """The same numbers."""
    longest: int
    """No segment has more tokens."""

    @property
    def num_segments(self) -> int:
        return self.host.numel() - 1


class WaveInputs(NamedTuple):
    """The tokens of a wave, segment after segment."""

    q: Tensor
    """[num_tokens, num_key_heads, key_dim], contiguous, like k and v."""
    k: Tensor
    v: Tensor
    """[num_tokens, num_heads, value_dim]."""
    decay: Tensor
    """[num_tokens, num_heads] or [num_tokens, num_heads, key_dim] fp32, with any strides."""
    beta: Tensor
    """[num_tokens, num_heads] fp32, with any strides."""
    place: Tensor | None
    """[num_tokens, num_heads, value_dim], contiguous, where the outputs may be written; None if they lie apart."""


class SegmentKernel(Protocol):
    """A library's operation over ragged segments."""

    def __call__(self, given: WaveInputs, borders: Borders, first: Tensor) -> tuple[Tensor, Tensor]:
        """Returns [num_tokens, num_heads, value_dim], scaled, and the states behind the segments, fp32.

        The outputs may be `given.place`. `first` are the states that segments begin with, contiguous, laid out as the
        library does. They may be changed.
        """


ALIGNMENT = 16
"""Bytes. Compiled kernels refuse tensors that do not begin at a multiple, or read them in smaller parts."""


def aligned(x: Tensor) -> Tensor:
    """The tensor itself if it is contiguous and begins at a whole number of `ALIGNMENT`, otherwise a copy."""
    return x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _is_aligned(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0


class _Wave(NamedTuple):
    tokens: PlaceList
    borders: Borders
    kept: Kept | None

    def place_in(self, out: Tensor) -> Tensor | None:
        """The outputs of the wave's tokens, if a library can write there."""
        part = None if self.tokens.run is None else out[self.tokens.run]
        return part if part is not None and _is_aligned(part) else None


class _Tile(NamedTuple):
    """Rows whose states fit the scratch memory."""

    num_rows: int
    read_slots: Tensor | None
    waves: tuple[_Wave, ...]


@dataclass(frozen=True, eq=False)
class WavePlan(AttentionPlan[RecurrentInputs]):
    """A step that a library computes."""

    spec: RecurrentSpec
    kernel: SegmentKernel
    layers: tuple[LayerStates, ...] | None
    """None under `TRANSIENT`. States are laid out as the library does."""
    tokens: PlannedTokens
    split: Split
    """Scratch memory for the queries, keys and values of all tokens."""
    spoiled: Tensor | None
    """[num_tokens, num_key_heads + num_heads] fp32, scratch memory: NaN for tokens whose key, or value, is not finite.
    None if no segment is read behind its end."""
    scratch: Tensor
    """Scratch memory for the states that the rows of a tile begin with."""
    tiles: tuple[_Tile, ...]

    def prepare(self) -> None:
        self.tokens.prepare()

    def run(self, layer: int, inputs: RecurrentInputs, out: Tensor) -> Lse | None:
        states = None if self.layers is None else self.layers[layer]
        tails = None if states is None else states.tail
        convolution = None if inputs.conv is None else Convolution(*inputs.conv, tails)
        unit = self.spec.unit_keys
        slots, rows = self.tokens.slots, self.tokens.rows
        split_mixed(inputs.mixed, convolution, slots, rows, self.split, unit=unit, spoiled=self.spoiled)
        for tile in self.tiles:
            behind = first_state(states, tile.read_slots, self.scratch[: tile.num_rows])
            for wave in tile.waves:
                behind = self._run_wave(wave, inputs, behind, out)
                if wave.kept is not None and states is not None:
                    wave.kept.put(states.state, behind)
        return None

    def _run_wave(self, wave: _Wave, inputs: RecurrentInputs, behind: Tensor, out: Tensor) -> Tensor:
        """Returns the states behind the wave's segments, which continue those of the first rows of `behind`."""
        of, place = wave.tokens.of, wave.place_in(out)
        beta = of(inputs.beta) if self.spoiled is None else self._marked(of(inputs.beta), of(self.spoiled))
        q, k, v = self.split
        given = WaveInputs(of(q), of(k), of(v), of(inputs.decay), beta, place)
        found, states = self.kernel(given, wave.borders, behind[: wave.borders.num_segments])
        if found is not place:
            wave.tokens.put(out, found)
        return states

    def _marked(self, beta: Tensor, spoiled: Tensor) -> Tensor:
        """[num_tokens, num_heads], contiguous: NaN for tokens that have a key or a value that is not finite."""
        spec = self.spec
        keys, values = torch.split(spoiled, [spec.num_key_heads, spec.num_heads], dim=1)
        found = torch.add(beta, values, out=torch.empty(beta.shape, dtype=beta.dtype, device=beta.device))
        found.view(-1, spec.num_key_heads, spec.group_size).add_(keys.unsqueeze(2))
        return found


class WavePlanner:
    """Plans the steps of one group for a library."""

    def __init__(
        self,
        context: BackendContext[RecurrentSpec],
        kernel: SegmentKernel,
        *,
        values_first: bool,
        reads_beyond: bool = False,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        """`values_first` if the library has states as [value_dim, key_dim], not as [key_dim, value_dim].
        `reads_beyond` if it reads keys and values behind the end of a segment."""
        self._spec = spec = context.spec
        self._kernel = kernel
        self._device = context.device
        layers = states_by_layer(spec, context.cache.states)
        self._layers = tuple(LayerStates(each.state.mT, each.tail) for each in layers) if values_first else layers
        sizes = (spec.value_dim, spec.key_dim) if values_first else (spec.key_dim, spec.value_dim)
        state = (spec.num_heads, *sizes)
        self._most_rows = max(1, min(context.limits.max_rows, scratch_bytes // (4 * torch.Size(state).numel())))
        lease, group = context.workspace.lease, context.group
        marks = (context.limits.max_step_tokens, spec.num_key_heads + spec.num_heads)
        self._scratch = {
            lane: (
                lease(group, "first states", lane, (self._most_rows, *state), torch.float32),
                lease(group, "convolved", lane, (context.limits.max_step_tokens * spec.channels,), context.dtype),
                lease(group, "spoiled", lane, marks, torch.float32) if reads_beyond else None,
            )
            for lane in context.limits.lanes
        }

    def plan(self, step: StepView, buffers: PlanBuffers) -> WavePlan:
        states, (scratch, flat, spoiled) = step.states, self._scratch[step.lane]
        maker, lens = LayoutMaker(states, self._device), step.batch.query_lens.exact()
        # Rows are cut only where a state is kept.
        tiles = [
            self._plan_tile(tile, maker)
            for tile in tiles_of(rows_of(lens), maker.kept_host(), max(lens, default=1) + 1, self._most_rows)
        ]
        # Behind the last segment of a wave there is nothing to read.
        is_alone = all(wave.borders.num_segments == 1 for tile in tiles for wave in tile.waves)
        return WavePlan(
            spec=self._spec,
            kernel=self._kernel,
            layers=None if states is None else self._layers,
            tokens=PlannedTokens.of(step, buffers),
            split=self._split(flat, step.batch.num_tokens),
            spoiled=None if is_alone or spoiled is None else spoiled[: step.batch.num_tokens],
            scratch=scratch,
            tiles=tuple(tiles),
        )

    def _split(self, flat: Tensor, num_tokens: int) -> Split:
        """Parts of `flat`, each contiguous."""
        spec = self._spec
        keys, values = (num_tokens, spec.num_key_heads, spec.key_dim), (num_tokens, spec.num_heads, spec.value_dim)
        shapes = [torch.Size(each) for each in (keys, keys, values)]
        parts = torch.split(flat[: num_tokens * spec.channels], [each.numel() for each in shapes])
        return Split(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))

    def _plan_tile(self, tile: LongTile, maker: LayoutMaker) -> _Tile:
        return _Tile(
            num_rows=len(tile.rows),
            read_slots=maker.read_slots(tile.rows),
            waves=tuple(self._plan_wave(wave, maker) for wave in tile.waves),
        )

    def _plan_wave(self, segments: Sequence[Segment], maker: LayoutMaker) -> _Wave:
        lens = [each.length for each in segments]
        starts = [0, *itertools.accumulate(lens)]
        borders = Borders(moved([starts], self._device)[0], torch.tensor(starts), max(lens))
        tokens = maker.tokens([RowTokens(each.row, each.first, each.length) for each in segments])
        return _Wave(tokens, borders, maker.kept([each.last for each in segments]))
