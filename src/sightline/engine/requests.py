"""A request in the step loop: its continuations, and when it reached each phase. Does not know what a step is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from sightline.core.metrics import PhaseSeconds
from sightline.core.request import Request
from sightline.engine.launch import LifeT


@dataclass(eq=False)
class LiveRequest(Generic[LifeT]):
    """A request in the loop."""

    request: Request
    sequences: tuple[LifeT, ...]
    """Its continuations, by index."""
    submitted_at: float
    """In the loop's clock time."""
    started_at: float | None = None
    """When it first had a row in a step."""
    first_token_at: float | None = None

    @property
    def is_finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def error(self) -> str | None:
        """Why the first of its continuations that failed did so."""
        return next((sequence.error for sequence in self.sequences if sequence.error is not None), None)

    def phases(self, now: float) -> PhaseSeconds:
        """How long each phase took, if the request ends `now`."""
        if self.started_at is None:
            return PhaseSeconds(now - self.submitted_at)
        queue, first = self.started_at - self.submitted_at, self.first_token_at
        if first is None:
            return PhaseSeconds(queue, now - self.started_at)
        return PhaseSeconds(queue, first - self.started_at, now - first)
