"""What a step of any kind of layer has: a batch on a rig, one layer's inputs for it, and the oracle's answer.

Inputs and answers are on the host, so that the device computes only what is tried. `steps` has the steps of layers that
keep entries per token, `state_steps` those of layers that keep a state per sequence.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from sightline.attention.contract import Lse
from sightline.attention.kinds import Feature
from sightline.attention.planner import PlannedBatch
from sightline.attention.workspace import MAIN_LANE, Lane
from sightline.core.batch import Batch
from sightline.runner.batching import assemble_transient
from sightline.testing.conformance.given_inputs import map_inputs, tensor_at, to_device
from sightline.testing.conformance.rig import AttentionRig, Row, row_work

_HOST = torch.device("cpu")
Asked: TypeAlias = Mapping[int, Sequence[int]]
"""For each row, in order, the new tokens that the oracle is asked about."""
_NOWHERE = 1 << 30
"""A place that no row has: what padding tokens are said to have chosen."""
_NOISE_NUMBERS = 1_000_003
"""Larger random tensors repeat this many numbers. A prime, so that no two entries of a row are alike."""


@cache
def _noise() -> Tensor:
    return torch.randn(_NOISE_NUMBERS, generator=torch.Generator().manual_seed(5))


@dataclass(frozen=True, eq=False)
class HostOutput:
    """The output of a step, on the host."""

    out: Tensor
    """[num_tokens, num_q_heads, out_dim]."""
    lse: Tensor | None
    """[num_tokens, num_q_heads]."""
    kept: Mapping[int, tuple[Tensor, ...]] | None = None
    """States behind tokens that keep one, by the token's place in the step; None for layers that keep entries."""
    entries: Mapping[int, Tensor] | None = None
    """Entries of several tokens, by the place of the token that completes each; None for other layers, and of what a
    step gave."""


def bits(tensor: Tensor) -> Tensor:
    """Returns a tensor as bytes, in which NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)


class LayerStep(ABC):
    """A batch on a rig, one layer's inputs for it, and contexts where earlier steps would put them."""

    names_of_numbers: ClassVar[tuple[str, ...]] = ("head", "number")
    """What the dimensions of an output are called, behind that of tokens."""
    contexts: list[tuple[Tensor, ...]]
    """What is kept of each row's context, on the host."""

    def __init__(
        self,
        bench: AttentionRig,
        rows: Sequence[Row],
        *,
        seed: int = 0,
        layer: int = 0,
        transient: bool = False,
        table_rows: Sequence[int] | None = None,
        contexts: Sequence[tuple[Tensor, ...]] | None = None,
        writes: bool = True,
    ) -> None:
        """Opens page-table rows unless `table_rows` are given. Draws contexts and writes them to the cache, unless
        `contexts` are given, which are there already, or `writes` is False."""
        self.bench = bench
        self.rows = tuple(rows)
        self.layer = layer
        self.problem: Any = bench.problem
        self.spec: Any = bench.specs[layer]
        """A spec of the problem's kind."""
        self._generator = torch.Generator().manual_seed(seed)
        num_tokens = sum(row.query_len for row in rows)
        self.inputs: Any = self.problem.random_inputs(self.spec, num_tokens, self._normal)
        """Inputs of the problem's kind, on the host."""
        self._find_place()
        self.contexts = self._random_contexts() if contexts is None else list(contexts)
        if transient:
            self.table_rows = [0] * len(rows)
            self.batch: Batch = assemble_transient(row_work(rows, self.table_rows), bench.device)
            return
        self.table_rows = bench.open_rows(rows) if table_rows is None else list(table_rows)
        self._occupy(is_there=contexts is not None)
        self.batch = bench.batch(rows, self.table_rows)
        if contexts is None and writes:
            self.write_contexts()

    @abstractmethod
    def _find_place(self) -> None:
        """Finds out where the layer's cache is."""

    @abstractmethod
    def _random_contexts(self) -> list[tuple[Tensor, ...]]:
        """Draws what is kept of each row's context."""

    @abstractmethod
    def _occupy(self, *, is_there: bool) -> None:
        """Declares that each row holds its context, which earlier steps have written if `is_there`."""

    @abstractmethod
    def write_contexts(self) -> None:
        """Writes each row's context to where earlier steps would put it."""

    @abstractmethod
    def next_step(self, query_len: int, *, seed: int) -> LayerStep:
        """Returns the next step of the same rows, over what the backend itself left in the cache."""

    @abstractmethod
    def expected(self, asked: Asked | None = None) -> HostOutput:
        """Returns the oracle's answer for all tokens, or for those that are asked about. Reads no cache."""

    @abstractmethod
    def unwritten(self, expected: HostOutput, tolerance: float) -> str | None:
        """Describes something that the step should have put in the cache and that is not there, or returns None.

        `expected` is the oracle's answer, and `tolerance` that of numbers which the backend computes.
        """

    def spoiled(self) -> str | None:
        """Describes something that no step may change and that has changed, or returns None."""
        return None

    def pad(self, num_rows: int, num_tokens: int, value: float) -> None:
        """Adds padding rows, and padding tokens whose inputs are all `value`, and whose places are in no row."""
        self.batch = self.batch.pad(len(self.rows) + num_rows, self.batch.num_tokens + num_tokens)

        def padded(tensor: Tensor) -> Tensor:
            filling = value if tensor.is_floating_point() else _NOWHERE
            return torch.cat([tensor, tensor.new_full((num_tokens, *tensor.shape[1:]), filling)])

        self.change_inputs(padded)

    def change_inputs(self, change: Callable[[Tensor], Tensor]) -> None:
        """Changes all inputs that have one row per token in the same way."""
        self.inputs = map_inputs(self.inputs, change, self.problem.per_token)

    def take_row(self, other: LayerStep, place: slice) -> None:
        """Copies all inputs of another step to these tokens, and its layer's weights."""
        names = self.problem.per_token
        for name in names:
            taken = tensor_at(other.inputs, name)
            if taken is not None:
                tensor_at(self.inputs, name)[place] = taken
        of_tokens = {name.partition(".")[0] for name in names}
        weights = {name: value for name, value in vars(other.inputs).items() if name not in of_tokens}
        self.inputs = replace(self.inputs, **weights)

    def _normal(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        if count <= _NOISE_NUMBERS:
            return torch.randn(*shape, generator=self._generator).to(self.bench.setting.dtype)
        start = int(torch.randint(_NOISE_NUMBERS, (1,), generator=self._generator))
        noise = _noise().to(self.bench.setting.dtype)
        return noise.repeat(-(-(start + count) // _NOISE_NUMBERS))[start : start + count].view(shape)

    def places(self, asked: Asked) -> Tensor:
        """Returns the indices of the tokens that are asked about."""
        starts = [0, *itertools.accumulate(row.query_len for row in self.rows)]
        places = [starts[row] + query for row, queries in asked.items() for query in queries]
        return torch.tensor(places, dtype=torch.int64)

    def plan(self, needs: frozenset[Feature] = frozenset(), lane: Lane = MAIN_LANE) -> PlannedBatch:
        return self.bench.planner.plan(self.batch, needs=needs, lane=lane)

    def given(self, planned: PlannedBatch, inputs: Any) -> Any:
        """Returns the part of the inputs that the layer takes in this plan."""
        del planned
        return inputs

    def attend(self, planned: PlannedBatch) -> HostOutput:
        """Runs the step's layer on a plan that `ensure` accepted. Output that the layer does not write stays NaN."""
        out = self.room(planned)
        with torch.inference_mode():
            lse = self.launch(planned, to_device(self.inputs, self.bench.device), out)
        return self.answer_in(planned, out, lse)

    def room(self, planned: PlannedBatch) -> Tensor:
        """Returns memory on the device for the layer's output, in which nothing is written yet."""
        del planned
        return self.empty_out()

    def clear(self, out: Tensor) -> None:
        """Makes memory for outputs look as if nothing had been written there."""
        out.fill_(torch.nan)

    def launch(self, planned: PlannedBatch, inputs: Any, out: Tensor) -> Lse | None:
        """Runs the step's layer on inputs on the device; `out` is from `room`."""
        return planned.attend(self.layer, self.given(planned, inputs), out)

    def answer_in(self, planned: PlannedBatch, out: Tensor, lse: Lse | None) -> HostOutput:
        """Returns what the plan's layer left in `out`, on the host. What it did not write is NaN."""
        del planned
        return HostOutput(out.to(_HOST), None if lse is None else lse.to(_HOST))

    def admitted(self, answer: Tensor, expected: HostOutput, asked: Asked | None) -> HostOutput:
        """Returns the oracle's answer, with the numbers of `answer` where several are right."""
        del answer, asked
        return expected

    def empty_out(self) -> Tensor:
        """Returns an output tensor on the device, filled with NaN."""
        shape = (self.batch.num_tokens, self.spec.num_q_heads, self.spec.out_dim)
        return torch.full(shape, torch.nan, dtype=self.bench.setting.dtype, device=self.bench.device)

    def run(self, needs: frozenset[Feature] = frozenset(), lane: Lane = MAIN_LANE) -> HostOutput:
        """Plans the step, checks the plan and runs it."""
        planned = self.bench.planner.ensure(self.plan(needs, lane))
        with torch.inference_mode():
            planned.prepare()
        return self.attend(planned)
