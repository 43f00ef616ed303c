"""One step of one layer that keeps a state per sequence, over random tensors, and the oracle's answer.

Before a step runs, the slots that it writes hold NaN, so that a state which is not written is not taken for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sightline.attention.contract import StateSlots
from sightline.attention.planner import PlannedBatch
from sightline.attention.workspace import MAIN_LANE, Lane
from sightline.cache.spec import PlaneSpec
from sightline.cache.states import STATES, StateTable
from sightline.core.batch import PADDING_SLOT
from sightline.testing.conformance.layer_step import Asked, HostOutput, LayerStep
from sightline.testing.conformance.problem import State
from sightline.testing.conformance.rig import Row

_PIECE = 16
"""Tokens that the oracle computes at once: it returns the state behind each of them."""
_EXACT_PLANES = frozenset({"tail"})
"""Planes of inputs as they are, which must be kept without an error."""


class StateStep(LayerStep):
    """A step of a layer that keeps states, with the states behind contexts in the slots of earlier steps."""

    def _find_place(self) -> None:
        self.states, self.layer_in_group = self.bench.states_of(self.layer)

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        planes: tuple[PlaneSpec, ...] = self.problem.planes(self.spec)
        return planes

    @property
    def table(self) -> StateTable:
        return self.bench.state_table

    @property
    def kept(self) -> tuple[int, ...]:
        """For each token of the step, the slot of the state behind it, 0 if it is not kept. Empty under TRANSIENT."""
        return self.batch.pools[STATES].kept if self.batch.pools else ()

    @property
    def slots(self) -> StateSlots:
        """The slots that the step reads and writes."""
        rows = self.batch.pools[STATES]
        assert rows.read_slots is not None, "a batch with states names those that it reads"
        return StateSlots(rows.read_slots, rows.write_slots, rows.kept)

    def _random_contexts(self) -> list[State]:
        return [
            self.problem.random_state(self.spec, self._normal) if row.context_len else self.problem.empty(self.spec)
            for row in self.rows
        ]

    def _occupy(self, *, is_there: bool) -> None:
        store = self.bench.store
        for row, table_row in zip(self.rows, self.table_rows, strict=True):
            # The steps of all layers share the slots of their rows.
            is_held = row.context_len in (0, *self.table.positions(table_row))
            if not is_there and not (is_held and store.lengths.committed(table_row) == row.context_len):
                store.fill_row(table_row, row.context_len)
            for place in row.checkpoints:
                self.table.pin(table_row, row.context_len + place + 1)

    def write_contexts(self) -> None:
        """Writes each row's state to the slot that the step reads, and NaN to those that it writes."""
        for row, table_row, state in zip(self.rows, self.table_rows, self.contexts, strict=True):
            if row.context_len:
                self._put(self.table.slot(table_row, row.context_len), state)
        self.clear_written()

    def _put(self, slot: int, state: State) -> None:
        for plane, values in zip(self.planes, state, strict=True):
            self.states.plane(plane.name)[self.layer_in_group, slot] = values.to(self.bench.device)

    def clear_written(self) -> None:
        """Fills the slots that the step writes, in its layer, with NaN."""
        slots = sorted(set(self.kept) - {PADDING_SLOT})
        for plane in self.planes:
            self.states.plane(plane.name)[self.layer_in_group, slots] = torch.nan

    def written_in(self, name: str) -> set[int]:
        """Returns the slots that the step may change in a plane of states, or of entries, by its name in a snapshot."""
        del name
        return set(self.kept) - {PADDING_SLOT}

    def read(self, slot: int) -> State:
        """Returns what the layer has in a slot, on the host."""
        return tuple(self.states.plane(plane.name)[self.layer_in_group, slot].cpu() for plane in self.planes)

    def attend(self, planned: PlannedBatch) -> HostOutput:
        answer = super().attend(planned)
        places = [place for place, slot in enumerate(self.kept) if slot]
        slots = torch.tensor([self.kept[place] for place in places], dtype=torch.int64, device=self.bench.device)
        kept = [self.states.plane(plane.name)[self.layer_in_group][slots].cpu() for plane in self.planes]
        return replace(answer, kept=dict(zip(places, zip(*kept, strict=True), strict=True)))

    def _row_tokens(self) -> Iterator[tuple[int, Row, slice]]:
        start = 0
        for number, row in enumerate(self.rows):
            yield number, row, slice(start, start + row.query_len)
            start += row.query_len

    def _answers(self, number: int, tokens: slice) -> Iterator[tuple[int, Tensor, tuple[Tensor, ...]]]:
        """Yields the place of a row's first token of each piece, the piece's outputs, and the states behind them."""
        state = self.contexts[number]
        for start in range(tokens.start, tokens.stop, _PIECE):
            piece = slice(start, min(start + _PIECE, tokens.stop))
            out, states = self.problem.answer(self.spec, self.inputs.part(piece), state)
            state = tuple(plane[-1] for plane in states)
            yield start, out, states

    def expected(self, asked: Asked | None = None) -> HostOutput:
        outs, kept, slots = [], dict[int, State](), self.kept
        for number, _, tokens in self._row_tokens():
            queries = range(tokens.stop - tokens.start) if asked is None else asked.get(number, ())
            if not queries:
                continue
            found = []
            for start, out, states in self._answers(number, tokens):
                found.append(out)
                for place in range(out.shape[0]):
                    if slots and slots[start + place]:
                        kept[start + place] = tuple(plane[place].clone() for plane in states)
            outs.append(torch.cat(found)[list(queries)])
        empty = torch.zeros(0, self.spec.num_q_heads, self.spec.out_dim)
        return HostOutput(torch.cat(outs) if outs else empty, None, kept)

    def unwritten(self, expected: HostOutput, tolerance: float) -> str | None:
        for number, row, tokens in self._row_tokens():
            last = tokens.stop - 1
            if row.query_len and not self.kept[last]:
                return f"expected the state behind the last token of row {number} to be kept, got write slot 0"
        assert expected.kept is not None, "the oracle of a layer with states gives them"
        for place, wanted in expected.kept.items():
            wrong = self._wrong(place, wanted, tolerance)
            if wrong is not None:
                return wrong
        return None

    def _wrong(self, place: int, wanted: State, tolerance: float) -> str | None:
        slot = self.kept[place]
        for plane, got, want in zip(self.planes, self.read(slot), wanted, strict=True):
            error = torch.where(got == want, 0.0, (got - want).abs())
            allowed = 0.0 if plane.name in _EXACT_PLANES else tolerance
            beyond = ~(error <= allowed * (1 + want.abs()))
            if beyond.any():
                first = tuple(int(index) for index in beyond.nonzero()[0])
                return (
                    f"expected the {plane.name} behind {self._told(place)} in slot {slot}, within {allowed:g} of the "
                    f"oracle's, got {int(beyond.sum())} of {beyond.numel()} numbers beyond it; the first, at {first}: "
                    f"expected {float(want[first]):.6g}, got {float(got[first]):.6g}"
                )
        return None

    def _told(self, place: int) -> str:
        number, row, tokens = next(each for each in self._row_tokens() if place < each[2].stop)
        return f"new token {place - tokens.start} of row {number} ({row.context_len}+{row.query_len})"

    def next_step(self, query_len: int, *, seed: int) -> StateStep:
        return self.following([replace(_after(row), query_len=query_len) for row in self.rows], seed=seed)

    def spoiled(self) -> str | None:
        if any(bool(plane.ne(0).any()) for plane in self.read(PADDING_SLOT)):
            return "expected slot 0, the empty state, to stay zero, got other numbers in it"
        return None

    def commit(self, lane: Lane = MAIN_LANE) -> None:
        """Makes the states behind the step's rows those that the next step, in the same lane, reads."""
        lengths = self.bench.store.lengths
        lengths.launch(self.batch, lane)
        for row, table_row in zip(self.rows, self.table_rows, strict=True):
            lengths.commit(table_row, row.seq_len)

    def following(self, rows: Sequence[Row], *, seed: int) -> StateStep:
        """Commits this step, and returns the next one, in which the same rows have these lengths."""
        self.commit()
        return self.continued(rows, seed=seed)

    def continued(self, rows: Sequence[Row], *, seed: int) -> StateStep:
        """Returns the step that follows this one, which is committed for all layers."""
        contexts = []
        for number, _, tokens in self._row_tokens():
            state = self.contexts[number]
            for _, _, states in self._answers(number, tokens):
                state = tuple(plane[-1] for plane in states)
            contexts.append(state)
        step = type(self)(self.bench, rows, seed=seed, layer=self.layer, table_rows=self.table_rows, contexts=contexts)
        step.clear_written()
        return step


def _after(row: Row) -> Row:
    return Row(row.seq_len, 0)
