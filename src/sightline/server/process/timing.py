"""When a client's request went through its phases, as the front end sees it."""

from __future__ import annotations

from sightline.core.metrics import PhaseSeconds


class TokenTimes:
    """When the tokens of one continuation came, and how many."""

    __slots__ = ("first_at", "last_at", "num_tokens")

    def __init__(self, now: float, num_tokens: int) -> None:
        self.first_at = self.last_at = now
        self.num_tokens = num_tokens


class RequestTimes:
    """When the phases of a client's request began.

    If it has several prompts, a phase begins with the first of them that reaches it, and the last one ends it.
    """

    def __init__(self, submitted_at: float) -> None:
        self.submitted_at = submitted_at
        self.started_at: float | None = None
        """When the first step began."""
        self.first_token_at: float | None = None
        self.ended_at = submitted_at

    def take(self, phases: PhaseSeconds) -> None:
        """Takes in the phases of a prompt that has ended."""
        at = self.submitted_at + phases.queue
        if phases.prefill is not None:
            self.started_at = at if self.started_at is None else min(at, self.started_at)
            at += phases.prefill
        if phases.decode is not None:
            self.first_token_at = at if self.first_token_at is None else min(at, self.first_token_at)
            at += phases.decode
        self.ended_at = max(self.ended_at, at)
