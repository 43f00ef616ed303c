"""The oracle of recurrent layers as a backend: token by token, in fp32. Slow on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import AttentionBackend, AttentionPlan, BackendContext, Lse, RecurrentInputs, StepView
from sightline.attention.kinds import RECURRENT_FEATURES, SpecKind
from sightline.attention.oracle.recurrent import empty_state, empty_tail, recur_row
from sightline.attention.oracle.rows import StateRow, reference_capability, state_rows
from sightline.attention.spec import RecurrentSpec
from sightline.cache.states import StatePool


@dataclass(frozen=True, eq=False)
class _ReferencePlan(AttentionPlan[RecurrentInputs]):
    spec: RecurrentSpec
    states: StatePool
    rows: tuple[StateRow, ...]

    def prepare(self) -> None:
        """Nothing to do: layers share no work."""

    def run(self, layer: int, inputs: RecurrentInputs, out: Tensor) -> Lse | None:
        for row in self.rows:
            state = row.read(self.states, "state", layer, empty_state(self.spec))
            tail = None
            if self.spec.conv_width:
                tail = row.read(self.states, "tail", layer, empty_tail(self.spec)).to(out.device)
            found = recur_row(self.spec, inputs.part(row.tokens), state.to(out.device), tail)
            out[row.tokens] = found.out.to(out.dtype)
            row.write(self.states, "state", layer, found.states)
            if found.tails is not None:
                row.write(self.states, "tail", layer, found.tails)
        return None


class ReferenceRecurrentBackend(AttentionBackend[RecurrentSpec, RecurrentInputs]):
    """Serves every recurrent spec, slowly."""

    capabilities: ClassVar[tuple[Capability, ...]] = (reference_capability(SpecKind.RECURRENT, RECURRENT_FEATURES),)

    def __init__(self, context: BackendContext[RecurrentSpec]) -> None:
        self._spec = context.spec
        self._states = context.cache.states

    def plan(self, step: StepView, buffers: PlanBuffers) -> _ReferencePlan:
        del buffers
        return _ReferencePlan(self._spec, self._states, state_rows(step))
