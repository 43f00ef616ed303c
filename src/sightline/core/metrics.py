"""Counters and current state of an engine, named as in other engines' metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineMetrics:
    """Counts since the engine was built, and its current state. Where rows are counted, each continuation counts as a
    request."""

    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage_perc: float
    """Share of usable pages held by running sequences, 0 to 1. Pages that are only cached count as free."""
    prefix_cache_queries: int
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_cache_hits: int
    """Prompt tokens that were found there."""
    prompt_tokens: int
    generation_tokens: int
    num_preemptions: int
    """How often a running sequence gave its pages back."""
    request_success: Mapping[str, int]
    """Continuations that ended, by finish reason."""
    requests_refused: int
    """Requests refused because the queue was full."""
    steps: int
    steps_cut: int
    """Steps that raised and were run again in parts."""
    plans: int
    """Steps that were planned."""
    plan_seconds: float
    """Total planning time."""
    plans_rebuilt: int
    degradations: int
    """Degradations in the ledger; notes are not counted."""
