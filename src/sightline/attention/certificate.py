"""The certificate of a plan: what the plan was made from, and how a difference is told.

Owns the facts that are compared. Does not know how plans are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sightline.attention.buffers import PlanMemory
from sightline.attention.contract import AttentionBackend
from sightline.attention.fingerprint import Fingerprint
from sightline.attention.workspace import Lane
from sightline.core.batch import BatchId


@dataclass(frozen=True, eq=False)
class PartRecord:
    """What one part of one group was planned with."""

    group: int
    place: int
    """Index among the group's backends."""
    backend: AttentionBackend[Any, Any]
    """The instance that planned."""


class StepContents(NamedTuple):
    """Fingerprints of the contents that must not change between planning and running."""

    batch: Fingerprint
    """Tensors of the batch and its page-table rows: a change needs a new batch."""
    plan: Fingerprint
    """Plan buffers: planning again fixes a change."""


@dataclass(frozen=True, eq=False)
class Certificate:
    """What a plan was made from. Compared at every forward; integers and identities only."""

    batch_id: BatchId
    num_rows: int
    num_tokens: int
    lane: Lane
    buffers: PlanMemory
    """The plan buffers that it filled."""
    epoch: int
    """Epoch of the plan buffers."""
    page_versions: Mapping[str, tuple[int, ...]]
    """Per pool key: the version of each page-table row that the plan reads."""
    parts: tuple[PartRecord, ...]
    """Parts of every group, in order."""
    contents: StepContents | None
    """Fingerprints of the contents; None unless `--paranoid`."""


class Staleness(NamedTuple):
    """What changed since a plan was made."""

    batch: tuple[str, ...]
    """Changes that a new plan cannot fix: the batch refers to pages that it no longer owns."""
    plan: tuple[str, ...]
    """Changes to derived state, fixed by planning again."""


def described_rows(key: str, rows: Sequence[int], expected: Sequence[int], current: Sequence[int]) -> str:
    """Which rows of a page table changed, in words."""
    moved = [
        f"row {row} was version {was}, is {now}"
        for row, was, now in zip(rows, expected, current, strict=True)
        if was != now
    ]
    return f"page table of pool {key} changed: {', '.join(moved)}"
