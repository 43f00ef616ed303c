"""Counts what a run exercised, so that a run which exercises nothing is noticed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass
class EventCounts:
    """How often each event happened."""

    seeds: int = 0
    steps: int = 0
    forwards: int = 0
    requests: int = 0
    """Requests that the engine accepted."""
    finished: int = 0
    """Requests that ended by length or a stop token."""
    forks: int = 0
    """Continuations beyond the first that ran."""
    retractions: int = 0
    shared_rows: int = 0
    """Rows that a caller gave up to one without a row."""
    cached_tokens: int = 0
    cancels: int = 0
    """Requests that ended because their client cancelled."""
    gone_clients: int = 0
    pauses: int = 0
    """Open requests whose client stopped reading."""
    deadlines: int = 0
    refusals: int = 0
    retries: int = 0
    refused_allocations: int = 0
    failed_forwards: int = 0
    failed_requests: int = 0
    spoilt_rows: int = 0
    slow_forwards: int = 0
    ended_in_flight: int = 0
    """Steps after which an ended request was still in flight."""
    device_faults: int = 0
    closes: int = 0
    drafts: int = 0
    """Rows with guesses that were committed."""
    trees: int = 0
    """Rows whose guesses were a tree."""
    accepted_tokens: int = 0
    """Guesses that were right."""
    wrong_drafts: int = 0
    """Drafts of which no guess was right."""
    whole_drafts: int = 0
    """Drafts of which a whole path was right, and no longer one was there."""
    border_drafts: int = 0
    """Drafts whose last right guess filled a page."""
    offloaded_blocks: int = 0
    """Pages that host memory took."""
    returned_blocks: int = 0
    """Pages that came back."""
    late_transfers: int = 0
    """Times that a transfer was asked for and had not ended."""
    failed_transfers: int = 0

    def __add__(self, other: EventCounts) -> EventCounts:
        return EventCounts(*(mine + theirs for mine, theirs in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[int, ...]:
        return tuple(asdict(self).values())

    def told(self) -> str:
        """Returns one line: `3 seeds, 1,200 steps, ...`."""
        return ", ".join(
            f"{value:,} {field.name.replace('_', ' ')}"
            for field, value in zip(fields(self), self.values(), strict=True)
        )
