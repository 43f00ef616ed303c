"""Computes the tiles of a planned step in a recurrent layer: short rows token by token, long rows chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sightline.attention.contract import RecurrentInputs
from sightline.attention.recurrent.chunks import chunk_terms, scan_chunk
from sightline.attention.recurrent.convolution import convolve, convolve_few
from sightline.attention.recurrent.layout import Block, PlaceList, ShortRows, StatesInPlace, Windows
from sightline.attention.recurrent.planes import LayerStates
from sightline.attention.recurrent.steps import StepTerms, step, step_terms
from sightline.attention.spec import RecurrentSpec


@dataclass(frozen=True, eq=False)
class ShortRun:
    """Rows of equal length, computed token by token."""

    spec: RecurrentSpec
    rows: ShortRows
    in_place: StatesInPlace | None
    """None if states are copied from and to their slots, all rows at once."""

    def __call__(self, inputs: RecurrentInputs, states: LayerStates | None, scratch: Tensor, out: Tensor) -> None:
        spec, rows = self.spec, self.rows
        mixed = self._convolved(inputs, states)
        terms = step_terms(spec, mixed, rows.of(inputs.decay), rows.of(inputs.beta))
        if states is None or self.in_place is None:
            found = self._copied(terms, states, scratch)
        else:
            found = self._read_in_place(terms, self.in_place, states.state, scratch)
        result = found.view(rows.num_rows, spec.num_heads, rows.length, spec.value_dim).transpose(1, 2)
        result = result * spec.scale
        if inputs.skip is not None:
            value = mixed[..., -spec.num_heads * spec.value_dim :].reshape(result.shape)
            result.addcmul_(value, inputs.skip.unsqueeze(-1))
        rows.tokens.put(out, result.flatten(0, 1))

    def _convolved(self, inputs: RecurrentInputs, states: LayerStates | None) -> Tensor:
        """[rows, tokens, channels] fp32. Writes the tails that are kept."""
        mixed, width = self.rows.of(inputs.mixed), self.spec.conv_width
        if inputs.conv is None:
            return mixed.float()
        plane = None if states is None else states.tail
        tails = self.rows.tails(plane, self.spec.channels, width)
        convolved, window = convolve_few(tails, mixed, inputs.conv, activated=True)
        self.rows.keep_tails(plane, window, width)
        return convolved

    def _copied(self, terms: StepTerms, states: LayerStates | None, scratch: Tensor) -> Tensor:
        state = first_state(states, self.rows.read_slots, scratch[: self.rows.num_rows])
        whole, found = [state.flatten(0, 1)], []
        for token, kept in enumerate(self.rows.kept):
            found.append(step(self.spec, terms, token, whole, whole))
            if kept is not None and states is not None:
                kept.put(states.state, state)
        return _joined(found)

    def _read_in_place(self, terms: StepTerms, slots: StatesInPlace, plane: Tensor, scratch: Tensor) -> Tensor:
        sources, found = slots.sources(plane), []
        for token in range(self.rows.length):
            targets = slots.targets(token, plane, scratch)
            found.append(step(self.spec, terms, token, sources, targets))
            sources = targets
        return _joined(found)


@dataclass(frozen=True, eq=False)
class LongRun:
    """Rows of any lengths, computed chunk by chunk."""

    spec: RecurrentSpec
    num_rows: int
    tokens: PlaceList
    """The rows' tokens, row after row."""
    windows: Windows | None
    """None without a convolution."""
    read_slots: Tensor | None
    """[rows] int64; None if all begin with an empty state."""
    blocks: tuple[Block, ...]

    def __call__(self, inputs: RecurrentInputs, states: LayerStates | None, scratch: Tensor, out: Tensor) -> None:
        convolved = self._convolved(inputs, states)
        state = first_state(states, self.read_slots, scratch[: self.num_rows])
        for block in self.blocks:
            self._run(block, convolved, state, inputs, states, out)

    def _convolved(self, inputs: RecurrentInputs, states: LayerStates | None) -> Tensor:
        """[places, channels] fp32: queries, keys and values of the rows' tokens. Writes the tails that are kept."""
        if self.windows is None or inputs.conv is None:
            return self.tokens.of(inputs.mixed).float()
        width, tails = self.spec.conv_width, None
        if states is not None and states.tail is not None and self.read_slots is not None:
            tails = states.tail.index_select(0, self.read_slots)
        window = self.windows.fill(inputs.mixed, tails, width)
        if states is not None and states.tail is not None:
            self.windows.keep(states.tail, window, width)
        return convolve(window, inputs.conv, activated=True).flatten(0, 1)

    def _run(
        self,
        block: Block,
        convolved: Tensor,
        state: Tensor,
        inputs: RecurrentInputs,
        states: LayerStates | None,
        out: Tensor,
    ) -> None:
        spec, shape = self.spec, (block.num_segments, block.width)
        mixed, decay, beta = (
            places.of(values).view(*shape, *values.shape[1:])
            for places, values in (
                (block.inputs, convolved),
                (block.tokens, inputs.decay),
                (block.tokens, inputs.beta),
            )
        )
        if block.padding is not None:
            # Padding neither decays the state nor adds to it.
            decay = decay.masked_fill(block.padding.view(*shape, *[1] * (decay.dim() - 2)), 0.0)
            beta = beta.masked_fill(block.padding.unsqueeze(-1), 0.0)
        terms = chunk_terms(spec, mixed, decay, beta)
        found = convolved.new_empty(block.num_segments, spec.num_heads, block.width, spec.value_dim)
        for segments, kept in block.waves:
            rows = state[: segments.stop - segments.start]
            found[segments] = scan_chunk(terms, segments, rows.flatten(0, 1)).view(found[segments].shape)
            if kept is not None and states is not None:
                kept.put(states.state, rows)
        found *= spec.scale
        if inputs.skip is not None:
            found.addcmul_(terms.values, inputs.skip.view(-1, 1, 1))
        results = found.transpose(1, 2).flatten(0, 1)
        block.targets.put(out, results if block.results is None else block.results.of(results))


def first_state(states: LayerStates | None, read_slots: Tensor | None, scratch: Tensor) -> Tensor:
    """[rows, num_heads, key_dim, value_dim]: a copy, in `scratch`, of the states that rows begin with."""
    if states is None or read_slots is None:
        return scratch.zero_()
    return torch.index_select(states.state, 0, read_slots, out=scratch)


def _joined(found: Sequence[Tensor]) -> Tensor:
    """[heads, tokens, value_dim], from the results of each token."""
    return found[0] if len(found) == 1 else torch.cat(tuple(found), dim=1)
