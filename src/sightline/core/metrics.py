"""What an engine has done, and what it is doing: names as other engines' metrics have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineMetrics:
    """Counts since the engine was built, and the state of now. A continuation counts as a request where rows do."""

    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage_perc: float
    """Of the pages that can be owned, those that running sequences hold: 0 to 1. What is only cached counts as free."""
    prefix_cache_queries: int
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_cache_hits: int
    """Of them, those that were there."""
    prompt_tokens: int
    generation_tokens: int
    num_preemptions: int
    """Times that a running sequence gave its pages back."""
    request_success: Mapping[str, int]
    """Continuations that ended, by finish reason."""
    requests_refused: int
    """Because the queue was full."""
    steps: int
    steps_cut: int
    """That raised, and were run again in parts."""
    plans: int
    """Steps that were planned."""
    plan_seconds: float
    """That planning took, in all."""
    plans_rebuilt: int
    degradations: int
    """Degradations in the ledger; notes are not counted."""
