"""Small correct backends of recurrent layers and of convolutions, made of replaceable parts. Row by row, in fp32."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from conformance.parts_backend import DTYPES, EVERYTHING
from conformance.state_parts import CORRECT, Kept, StateParts, StateRow, Token
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import ANY, Capability, GraphLevel, HostLengths
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    ConvolutionInputs,
    ConvWeights,
    Lse,
    RecurrentInputs,
    StepView,
)
from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.spec import ConvolutionSpec, RecurrentSpec
from sightline.attention.workspace import Lane
from sightline.cache.states import StatePool

RECURRENT = replace(
    EVERYTHING,
    spec_kinds=frozenset({SpecKind.RECURRENT}),
    dtypes=DTYPES,
    cache_dtypes=ANY,
    features=frozenset(
        {
            Feature.DELTA_RULE,
            Feature.CHANNEL_DECAY,
            Feature.SKIP,
            Feature.DETERMINISTIC,
            Feature.BATCH_INVARIANT,
            Feature.SEVERAL_PLANS,
        }
    ),
    host_lengths=HostLengths.EXACT,
    graph=GraphLevel.NONE,
)
CONVOLUTION = replace(
    RECURRENT,
    spec_kinds=frozenset({SpecKind.CONVOLUTION}),
    features=frozenset({Feature.DETERMINISTIC, Feature.BATCH_INVARIANT, Feature.SEVERAL_PLANS}),
)


@dataclass(frozen=True, eq=False)
class _StatePlan(AttentionPlan[Any]):
    """What the plans of both kinds have in common: which rows there are, and where their states are."""

    parts: StateParts
    spec: Any
    states: StatePool
    rows: tuple[StateRow, ...]
    is_transient: bool
    kept: Kept
    lane: Lane

    def prepare(self) -> None:
        """Layers share nothing but rows."""

    def planes(self, layer: int) -> dict[str, Tensor]:
        """The planes of a layer's states; none under TRANSIENT."""
        if self.is_transient:
            return {}
        place = self.parts.layer(layer)
        return {plane.name: self.states.plane(plane.name)[place] for plane in self.states.spec.planes}

    def rows_of(self, layer: int) -> tuple[StateRow, ...]:
        return tuple(replace(row, layer=layer) for row in self.parts.slots(self.rows, self.kept, self.lane))

    def begin(self, planes: dict[str, Tensor], name: str, row: StateRow, rows: tuple[StateRow, ...]) -> Tensor:
        shapes = {plane.name: plane.shape for plane in self.states.spec.planes}
        if name not in planes:
            return torch.zeros(shapes[name], device=self.states.plane(name).device)
        numbers = self.parts.read(planes[name], self.parts.read_slot(row, rows, self.kept))
        self.parts.around(planes[name], row)
        return numbers

    def keep(self, planes: dict[str, Tensor], name: str, row: StateRow, behind: list[Tensor]) -> None:
        if name in planes:
            for slot, numbers in zip(self.parts.kept(row), behind, strict=True):
                self.parts.write(planes[name], slot, numbers)

    def convolve(self, x: Tensor, conv: ConvWeights, row: StateRow, tail: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The convolved tokens of a row [query_len, channels], and the tail behind each of them."""
        out, tails = [], []
        weight, bias = conv.weight.float(), None if conv.bias is None else conv.bias.float()
        for place in range(row.query_len):
            window = torch.cat([tail, x[row.first_token + place].float()[:, None]], dim=1)
            out.append(self.parts.bias((window * weight).sum(1), bias))
            tail = self.parts.tail(window, Token(place, row, self.is_transient))
            tails.append(tail)
        tails[-1] = self.parts.last_tail(tails[-1], row, x)
        return torch.stack(out), tails

    def put(self, out: Tensor, row: StateRow, found: list[Tensor] | Tensor) -> None:
        out[row.tokens] = torch.stack(list(found)).to(out.dtype)


@dataclass(frozen=True, eq=False)
class _RecurrentPlan(_StatePlan):
    def run(self, layer: int, inputs: RecurrentInputs, out: Tensor) -> Lse | None:
        planes, rows = self.planes(layer), self.rows_of(layer)
        rates = (self.parts.rates(inputs.decay), self.parts.rates(inputs.beta))
        for row in rows:
            state = self.parts.begin(self.begin(planes, "state", row, rows), row, self.kept)
            mixed = given = inputs.mixed[row.tokens].float()
            if inputs.conv is not None:
                tail = self.begin(planes, "tail", row, rows)
                convolved, tails = self.convolve(inputs.mixed, inputs.conv, row, tail)
                self.keep(planes, "tail", row, tails)
                mixed = self.parts.activate(convolved)
            found, behind = [], []
            for place in range(row.query_len):
                token = Token(place, row, self.is_transient)
                decay, beta = (each[row.first_token + place] for each in rates)
                result, state = self._step(token, mixed[place], decay, self.parts.beta(beta), state)
                if inputs.skip is not None:
                    values = self._values(self.parts.skipped(mixed[place], given[place]))
                    result = result + self.parts.skip(inputs.skip, self.spec)[:, None] * values
                found.append(result)
                behind.append(state)
            self.parts.end(state, row, self.kept)
            self.keep(planes, "state", row, behind)
            self.put(out, row, found)
        return None

    def _step(self, token: Token, mixed: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The output of a token, and the state behind it."""
        spec, parts = self.spec, self.parts
        keys = spec.num_key_heads * spec.key_dim
        query, key = (
            parts.heads(each.view(spec.num_key_heads, spec.key_dim), spec)
            for each in (mixed[:keys], mixed[keys : 2 * keys])
        )
        value = self._values(mixed)
        if spec.unit_keys:
            query, key = parts.unit_query(query), parts.unit_key(key)
        decay = parts.decay(decay if spec.channel_decay else decay[:, None], token)
        decayed = parts.survives(decay, self.kept)[:, :, None] * state
        if spec.delta_rule:
            value = value - torch.einsum("hk,hkv->hv", key, parts.recalled_from(decayed, state))
        after = decayed + key[:, :, None] * (beta[:, None] * value)[:, None, :]
        return parts.scale(spec) * torch.einsum("hk,hkv->hv", query, after), after

    def _values(self, mixed: Tensor) -> Tensor:
        keys = 2 * self.spec.num_key_heads * self.spec.key_dim
        return mixed[keys:].view(self.spec.num_heads, self.spec.value_dim)


@dataclass(frozen=True, eq=False)
class _ConvolutionPlan(_StatePlan):
    def run(self, layer: int, inputs: ConvolutionInputs, out: Tensor) -> Lse | None:
        planes, rows = self.planes(layer), self.rows_of(layer)
        for row in rows:
            tail = self.parts.begin(self.begin(planes, "tail", row, rows), row, self.kept)
            found, tails = self.convolve(inputs.x, inputs.conv, row, tail)
            self.parts.end(tails[-1], row, self.kept)
            self.keep(planes, "tail", row, tails)
            self.put(out, row, found[:, None])
        return None


class StatePartsBackend(AttentionBackend[Any, Any]):
    """Made by `make_state_backend`, which gives it its parts."""

    parts: StateParts
    plan_type: type[_StatePlan]

    def __init__(self, context: BackendContext[RecurrentSpec | ConvolutionSpec]) -> None:
        self._spec = context.spec
        self._states = context.cache.states
        self._kept: Kept = {}
        self._num_plans = 0

    def plan(self, step: StepView, buffers: PlanBuffers) -> _StatePlan:
        del buffers
        batch, states = step.batch, step.states
        self._num_plans += 1
        offsets = batch.query_offsets_host()
        reads = None if states is None else states.read_slots.tolist()
        rows = tuple(
            StateRow(
                number=number,
                first_token=offsets[number],
                query_len=query_len,
                context_len=context_len,
                read_slot=0 if reads is None else reads[number],
                kept=() if states is None else states.kept_host[offsets[number] : offsets[number + 1]],
                plan=self._num_plans,
            )
            for number, (query_len, context_len) in enumerate(
                zip(batch.query_lens.exact(), batch.context_lens.exact(), strict=True)
            )
            if query_len
        )
        self._kept["rows", step.lane] = rows
        return self.plan_type(self.parts, self._spec, self._states, rows, states is None, self._kept, step.lane)


def make_state_backend(parts: StateParts = CORRECT, *, declares: Capability = RECURRENT) -> type[StatePartsBackend]:
    """A backend of these parts that declares this row, for the row's kind of layers."""
    plans = {SpecKind.RECURRENT: _RecurrentPlan, SpecKind.CONVOLUTION: _ConvolutionPlan}
    [kind] = declares.spec_kinds
    fields = {"parts": parts, "capabilities": (declares,), "plan_type": plans[kind]}
    return type("MadeOfStateParts", (StatePartsBackend,), fields)
