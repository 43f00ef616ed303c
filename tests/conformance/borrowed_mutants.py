"""Backends and planners with one fault of borrowed caches each, and the check that must find it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.mutants import Mutant
from conformance.parts import CORRECT, Kept, Keys, Planes, Tokens, is_paged, read_plane, sees, take_buffer
from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import BackendContext, StepView
from sightline.attention.places import LayerPlace
from sightline.attention.planner import Planner
from sightline.attention.spec import SoftmaxSpec
from sightline.core.batch import MaskKind


class OwnPlaces(Planner):
    """Takes a layer's place in its group for the place of its entries."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._places = {
            layer: LayerPlace(group, index)
            for group, binding in enumerate(self._bindings)
            for index, layer in enumerate(binding.group.layers)
        }


class StaleLoan:
    """A plan that borrows reads the pool as it was when the step was planned."""

    def __init__(self) -> None:
        self._pools: list[Any] = []
        self._copies: dict[str, Tensor] = {}

    def accept(self, context: BackendContext[SoftmaxSpec]) -> None:
        self._pools = [*context.cache.pools.values()]

    def take(
        self, buffers: PlanBuffers, step: StepView, kept: Kept, name: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        if step.is_borrowed:
            [pool] = self._pools
            self._copies = {plane.name: pool.plane(plane.name).clone() for plane in pool.spec.planes}
        return take_buffer(buffers, step, kept, name, shape, dtype)

    def read(self, planes: Planes, slots: Tensor, kept: Kept) -> Tensor:
        if planes.step.is_borrowed:
            planes = replace(planes, pool=self._copies[planes.name][planes.layer])
        return read_plane(planes, slots, kept)


def sees_behind_the_context(tokens: Tokens, keys: Keys, tree: Tensor, page_size: int) -> Tensor:
    behind = tokens.is_kind(MaskKind.CONTEXT) & (keys.new == 0) & (tokens.query_len > 0)
    return sees(tokens, keys, tree, page_size) | behind


_STALE = StaleLoan()

BORROWED_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "borrowed-write",
        "A BORROWED plan writes entries.",
        "shared-cache",
        replace(CORRECT, writes=lambda step: not step.is_transient),
    ),
    Mutant(
        "borrowed-from-inputs",
        "A BORROWED plan reads entries of its own step instead of the pool.",
        "shared-cache",
        replace(CORRECT, reads=is_paged),
    ),
    Mutant(
        "own-place-for-lenders",
        "A layer that borrows reads the layer at its own place in its group, not its lender.",
        "shared-cache",
        planner=OwnPlaces,
    ),
    Mutant(
        "stale-loan",
        "A BORROWED plan reads the pool as it was before its lender wrote.",
        "lent-in-the-step",
        replace(CORRECT, accept=_STALE.accept, take=_STALE.take, read=_STALE.read),
    ),
    Mutant(
        "sees-behind-the-context",
        "A token that sees the context alone sees one entry behind it.",
        "context-alone",
        replace(CORRECT, sees=sees_behind_the_context),
    ),
)
