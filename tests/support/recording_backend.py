"""A backend that another one serves, and that keeps what it was asked to plan and to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from torch import Tensor

from sightline.attention.backends.registry import ENTRY_POINT_GROUP
from sightline.attention.backends.torch.backend import TorchBackend
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Capability
from sightline.attention.contract import (
    AttentionBackend,
    AttentionPlan,
    BackendContext,
    Lse,
    StepView,
)
from sightline.core import extensions


@dataclass(frozen=True, eq=False)
class Record:
    """One plan, and what became of it."""

    step: StepView
    prepared: list[int] = field(default_factory=list)
    """How many layers had run each time that it was prepared."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """The layer within the group and the tokens of each run."""

    @property
    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of contexts and of queries."""
        return self.step.batch.context_lens.exact(), self.step.batch.query_lens.exact()


@dataclass(frozen=True, eq=False)
class _RecordingPlan(AttentionPlan[Any]):
    inner: AttentionPlan[Any]
    record: Record

    def prepare(self) -> None:
        self.record.prepared.append(len(self.record.runs))
        self.inner.prepare()

    def run(self, layer: int, inputs: Any, out: Tensor) -> Lse | None:
        self.record.runs.append((layer, out.shape[0]))
        return self.inner.run(layer, inputs, out)


class RecordingBackend(AttentionBackend[Any, Any]):
    """Gives the answers of the torch backend."""

    capabilities: ClassVar[tuple[Capability, ...]] = TorchBackend.capabilities
    served_by: ClassVar[type[AttentionBackend[Any, Any]]] = TorchBackend

    def __init__(self, context: BackendContext[Any]) -> None:
        self.context = context
        self.records: list[Record] = []
        self._inner = self.served_by(context)

    def plan(self, step: StepView, buffers: PlanBuffers) -> _RecordingPlan:
        self.records.append(Record(step))
        return _RecordingPlan(self._inner.plan(step, buffers), self.records[-1])


def recording(backend: type[AttentionBackend[Any, Any]], rows: tuple[Capability, ...]) -> type[RecordingBackend]:
    """A recording backend that gives the answers of another one, and claims these rows."""
    return type(f"Recording{backend.__name__}", (RecordingBackend,), {"capabilities": rows, "served_by": backend})


@dataclass(frozen=True)
class _EntryPoint:
    name: str
    load: Callable[[], type]
    value: str = "a test"
    dist: None = None


def install(monkeypatch: pytest.MonkeyPatch, **backends: type[AttentionBackend[Any, Any]]) -> None:
    """Makes backends known by name, as if a package had registered them."""
    entries = [_EntryPoint(name, lambda backend=backend: backend) for name, backend in backends.items()]  # type: ignore[misc]
    monkeypatch.setattr(extensions, "entry_points", lambda *, group: entries if group == ENTRY_POINT_GROUP else ())
