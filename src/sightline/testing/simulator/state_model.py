"""A recurrent group whose state is the hash of all tokens before it, for the simulated model.

The state holds the sum that the hash is made of, in pieces of 16 bits, which fp32 represents exactly. A state that is
stale, another row's, or behind another number of tokens thus gives another hash than the entries do. A state behind a
special token is NaN or infinite, as the hash is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import ANY, Capability, HostLengths
from sightline.attention.contract import AttentionBackend, AttentionPlan, BackendContext, RecurrentInputs, StepView
from sightline.attention.kinds import SpecKind
from sightline.attention.spec import RecurrentSpec
from sightline.core.device import DeviceKind
from sightline.core.errors import PlanError
from sightline.testing.simulator.numbers import DTYPE
from sightline.testing.simulator.oracle import MASK, NUM_ORDINARY, RAISING, WEIGHTS

PIECES, _BITS = 4, 16
_WHOLE = (1 << PIECES * _BITS) - 1
_PIECE = (1 << _BITS) - 1
STATE_SPEC = RecurrentSpec(1, 1, 1, PIECES, 1.0, delta_rule=False, channel_decay=False, unit_keys=False, conv_width=0)


Total: TypeAlias = float | int
"""A sum of tokens, modulo 2^64; NaN or infinite behind a special token."""


def joined(pieces: NDArray[Any]) -> Total:
    """The sum that a state holds; NaN or infinity as it is."""
    if not np.isfinite(pieces).all():
        return math.inf if np.isposinf(pieces).any() else math.nan
    return sum(int(piece) << _BITS * place for place, piece in enumerate(pieces.tolist()))


def cut(total: Total) -> list[float]:
    if isinstance(total, float):
        return [total] * PIECES
    return [float(total >> _BITS * place & _PIECE) for place in range(PIECES)]


def behind_token(total: Total, token: float, position: int) -> Total:
    """The sum behind one more token."""
    if total == math.inf or token == RAISING:
        return math.inf
    if isinstance(total, float) or not token < NUM_ORDINARY:
        return math.nan
    return total + (int(token) * 64 + position * 8192 + 1) * int(WEIGHTS[position]) & _WHOLE


def added(one: Total, two: Total) -> Total:
    """The sum of two runs of tokens; infinite or NaN if that of either is."""
    if isinstance(one, float) or isinstance(two, float):
        return math.inf if math.inf in (one, two) else math.nan
    return one + two & _WHOLE


@dataclass(frozen=True, eq=False)
class _SummingPlan(AttentionPlan[RecurrentInputs]):
    states: NDArray[np.float32]
    """[num_slots, pieces]."""
    read_slots: tuple[int, ...]
    kept: tuple[int, ...]
    query_lens: tuple[int, ...]

    def prepare(self) -> None:
        """Nothing is shared between layers."""

    def run(self, layer: int, inputs: RecurrentInputs, out: Tensor) -> None:
        """Hashes the tokens up to each new one, and keeps the sums that later steps go on from."""
        del layer
        numbers, results, place = inputs.mixed.numpy(), out.numpy(), 0
        for slot, count in zip(self.read_slots, self.query_lens, strict=True):
            total = joined(self.states[slot])
            for _ in range(count):
                total = behind_token(total, float(numbers[place, 0]), int(numbers[place, 1]))
                results[place] = total if isinstance(total, float) else float(total & MASK)
                if self.kept[place]:
                    self.states[self.kept[place]] = cut(total)
                place += 1


class SummingBackend(AttentionBackend[RecurrentSpec, RecurrentInputs]):
    """Reads the states that the step names."""

    capabilities: ClassVar[tuple[Capability, ...]] = (
        Capability(
            spec_kinds=frozenset({SpecKind.RECURRENT}),
            devices=frozenset({DeviceKind.CPU}),
            compute_capabilities=ANY,
            dtypes=frozenset({DTYPE}),
            cache_dtypes=frozenset({DTYPE}),
            head_dims=frozenset({1}),
            group_sizes=frozenset({1}),
            page_sizes=ANY,
            features=frozenset(),
            host_lengths=HostLengths.EXACT,
        ),
    )

    def __init__(self, context: BackendContext[RecurrentSpec]) -> None:
        self._states = context.cache.states.plane("state")[0].view(-1, PIECES).numpy()

    def plan(self, step: StepView, buffers: PlanBuffers) -> _SummingPlan:
        del buffers
        slots = step.states
        if slots is None:
            raise PlanError("expected steps with a cache, which is all that the simulation runs, got one without")
        read = tuple(slots.read_slots.tolist())
        return _SummingPlan(self._states, read, slots.kept_host, tuple(step.batch.query_lens.exact()))
