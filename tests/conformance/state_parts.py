"""The parts of a correct backend of layers with states, one by one: a fault is one of them replaced.

    slot of the context ─▶ state, tail ─▶ token by token ─▶ slots of kept tokens
                                              └─ window ─▶ mixed ─▶ query, key, value ─▶ decayed, stored, read

A row goes token by token, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sightline.attention.spec import RecurrentSpec
from sightline.attention.workspace import Lane

Kept: TypeAlias = dict[Any, Any]
"""What a backend keeps from step to step. The correct one keeps nothing."""
CHUNK = 64
"""Tokens of a row between which some faults lose something."""


@dataclass(frozen=True)
class StateRow:
    """One row of a step."""

    number: int
    first_token: int
    query_len: int
    context_len: int
    read_slot: int
    kept: tuple[int, ...]
    """For each token, the slot of the state behind it; 0 for none."""
    plan: int = 0
    """A number that no other plan has."""
    layer: int = 0

    @property
    def tokens(self) -> slice:
        return slice(self.first_token, self.first_token + self.query_len)


@dataclass(frozen=True)
class Token:
    """One token of a row."""

    place: int
    """In its row."""
    row: StateRow
    is_transient: bool


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def by_groups(heads: Tensor, spec: RecurrentSpec) -> Tensor:
    """Each key head for all heads that share it."""
    return heads.repeat_interleave(spec.group_size, dim=0)


def as_they_are(decay: Tensor, token: Token) -> Tensor:
    del token
    return decay


def read_of_plane(plane: Tensor, slot: int) -> Tensor:
    return plane[slot].clone()


def write_to_plane(plane: Tensor, slot: int, numbers: Tensor) -> None:
    if slot:
        plane[slot] = numbers


@dataclass(frozen=True)
class StateParts:
    """What a backend is made of. The defaults are correct."""

    layer: Callable[[int], int] = lambda layer: layer
    """Whose states a layer reads and writes."""
    read_slot: Callable[[StateRow, tuple[StateRow, ...], Kept], int] = lambda row, rows, kept: row.read_slot
    """Where the state behind a row's context is."""
    begin: Callable[[Tensor, StateRow, Kept], Tensor] = lambda state, row, kept: state
    """The state that a row begins with."""
    end: Callable[[Tensor, StateRow, Kept], None] = lambda state, row, kept: None
    """Takes the state behind a row's last token."""
    read: Callable[[Tensor, int], Tensor] = read_of_plane
    write: Callable[[Tensor, int, Tensor], None] = write_to_plane
    """Puts numbers in a slot, unless it is 0."""
    kept: Callable[[StateRow], tuple[int, ...]] = lambda row: row.kept
    """For each token of a row, the slot that the state behind it goes to."""
    around: Callable[[Tensor, StateRow], None] = lambda plane, row: None
    """Whatever else is done to a plane once a row's state was read."""
    decay: Callable[[Tensor, Token], Tensor] = as_they_are
    """[num_heads, key_dim or 1] of a token."""
    survives: Callable[[Tensor, Kept], Tensor] = lambda decay, kept: torch.exp(decay)
    """What is left of a state that decays so."""
    beta: Callable[[Tensor], Tensor] = lambda beta: beta
    rates: Callable[[Tensor], Tensor] = lambda numbers: numbers
    """Decays and betas [num_tokens, ...] as they are given."""
    heads: Callable[[Tensor, RecurrentSpec], Tensor] = by_groups
    scale: Callable[[RecurrentSpec], float] = lambda spec: spec.scale
    unit_query: Callable[[Tensor], Tensor] = unit
    unit_key: Callable[[Tensor], Tensor] = unit
    recalled_from: Callable[[Tensor, Tensor], Tensor] = lambda decayed, before: decayed
    """The state from which the delta rule recalls."""
    activate: Callable[[Tensor], Tensor] = torch.nn.functional.silu
    bias: Callable[[Tensor, Tensor | None], Tensor] = lambda result, bias: result if bias is None else result + bias
    tail: Callable[[Tensor, Token], Tensor] = lambda window, token: window[:, 1:]
    """The tail behind a token, of the inputs that the convolution sees there, the token's own last."""
    last_tail: Callable[[Tensor, StateRow, Tensor], Tensor] = lambda tail, row, x: tail
    """The tail behind a row's last token; `x` are the inputs of all tokens of the step."""
    skipped: Callable[[Tensor, Tensor], Tensor] = lambda convolved, given: convolved
    """The values that are added to the output, of those behind and before the convolution."""
    skip: Callable[[Tensor, RecurrentSpec], Tensor] = lambda skip, spec: skip
    slots: Callable[[tuple[StateRow, ...], Kept, Lane], tuple[StateRow, ...]] = lambda rows, kept, lane: rows
    """The rows as they are when a plan runs."""


CORRECT = StateParts()
