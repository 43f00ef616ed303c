"""What an engine would run, as values: groups, choices, memory, steps, and the entries of the ledger.

Does not know how it was found out, nor how it is printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sightline.core.ledger import Degradation, Note
from sightline.diagnose.planned_step import PlannedStep

NO_REMEDY = "none: it lacks what this model needs"


@dataclass(frozen=True)
class RefusedBackend:
    """A backend that was not chosen."""

    name: str
    reasons: tuple[str, ...]
    remedy: str
    serves_kind: bool
    """False if no row of it is for such layers at all."""


@dataclass(frozen=True)
class ExplainedChoice:
    """The backend for one or several kinds of rows of a group."""

    works: tuple[str, ...]
    """The kinds of rows."""
    name: str
    row: str
    """The label of its capability row."""
    unproven: tuple[str, ...]
    """Why it is declared and not proven; empty if it is proven on this machine for everything that is asked of it."""
    graph: str
    """Which steps may be captured."""
    refused: tuple[RefusedBackend, ...]
    """Every other backend."""

    @property
    def is_proven(self) -> bool:
        return not self.unproven


@dataclass(frozen=True)
class ExplainedGroup:
    """A group of layers."""

    network: str
    """Empty for the model itself; otherwise which network that drafts for it."""
    name: str
    layers: tuple[int, ...]
    label: str
    kind: str
    spec: Mapping[str, object]
    """The fields of its attention spec."""
    features: tuple[str, ...]
    page_size: int
    cache_dtype: str
    policies: tuple[str, ...]
    borrows_from: str | None
    bytes_per_token: int
    """What a token has in the pools of all its layers."""
    choices: tuple[ExplainedChoice, ...]


@dataclass(frozen=True)
class PlannedMemory:
    """One line of the memory ledger."""

    name: str
    num_bytes: int | None
    """None if it is not known without building."""
    is_limit: bool = False
    """True if it is what is set aside, of which less may be taken."""
    details: tuple[tuple[str, int], ...] = ()
    """What it is made of, and the bytes of each."""
    remark: str = ""


@dataclass(frozen=True)
class ExplainedMemory:
    """How the device's memory is shared out."""

    total_bytes: int
    allowed_bytes: int
    parts: tuple[PlannedMemory, ...]
    shortage: str
    """Why the model does not fit; empty if it does."""


@dataclass(frozen=True)
class Capacity:
    """What fits. All 0 if the model does not."""

    cache_tokens: int
    num_pages: int
    page_size: int
    max_rows: int
    max_step_tokens: int
    max_model_len: int


@dataclass(frozen=True)
class Explanation:
    """Everything that is decided before an engine is built."""

    model: str
    device: str
    compute_capability: tuple[int, int] | None
    is_here: bool
    dtype: str
    settings: Mapping[str, object]
    """Every resolved setting."""
    groups: tuple[ExplainedGroup, ...]
    memory: ExplainedMemory
    capacity: Capacity
    captured: tuple[str, ...]
    """The steps that are captured in graphs, or recorded."""
    steps: tuple[PlannedStep, ...]
    degradations: tuple[Degradation, ...]
    notes: tuple[Note, ...]

    def to_data(self) -> dict[str, Any]:
        """The explanation as JSON data."""
        return asdict(self)
