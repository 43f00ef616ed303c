"""Counters and current state of an engine, named as in other engines' metrics."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds, inclusive, by which steps are counted."""


class PhaseSeconds(NamedTuple):
    """How long a request was in each phase."""

    queue: float
    """Time from submission to the first step, or to the end if there was none."""
    prefill: float | None = None
    """Time from the first step to the first token, or to the end if there was none; None if no step was run."""
    decode: float | None = None
    """Time from the first token to the end; None if there was no token."""


class StepSizes:
    """Counts steps by their numbers of tokens."""

    def __init__(self) -> None:
        self.counts = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        """Steps up to each of `STEP_TOKEN_BOUNDS` and above the one before; then those above the last."""
        self.total = 0
        """Tokens of all steps."""

    def observe(self, num_tokens: int) -> None:
        self.counts[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1
        self.total += num_tokens


class StepPhase(Enum):
    """What the host does in a step, in this order."""

    SCHEDULE = "schedule"
    ASSEMBLE = "assemble"
    PLAN = "plan"
    FORWARD = "forward"
    """The network; on a GPU, only the launch of its kernels."""
    SAMPLE = "sample"
    """Whatever consumes the outputs of the model."""
    READ = "read"
    """Waits for the device."""
    COMMIT = "commit"


class PhaseTimes:
    """Host time of steps by phase. A phase lasts from the end of the one before to its own."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = dict.fromkeys(StepPhase, 0.0)
        self._clock = clock
        self._last = clock()

    def begin(self) -> None:
        """Begins a step: the time since the last one is no phase's."""
        self._last = self._clock()

    def end(self, phase: StepPhase) -> None:
        now = self._clock()
        self.seconds[phase] += now - self._last
        self._last = now


@dataclass(frozen=True)
class EngineMetrics:
    """Counts since the engine was built, and its current state. Where rows are counted, each continuation counts as a
    request."""

    num_requests_running: int
    num_requests_waiting: int
    num_requests_paused: int
    """Paused because their clients read too slowly; they hold no row and no page."""
    kv_cache_usage_perc: float
    """Share of usable pages held by running sequences, 0 to 1. Pages that are only cached count as free."""
    state_checkpoints: int
    """Recurrent states that are kept for sequences that begin alike."""
    prefix_cache_queries: int
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_cache_hits: int
    """Prompt tokens that were found there, in any tier."""
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
    steps_uncaptured: int
    """Steps that ran eagerly because their plan did not fit the buffers that their captured graph reads."""
    plans: int
    """Steps that were planned."""
    plan_seconds: float
    """Total planning time."""
    plans_rebuilt: int
    degradations: int
    """Degradations in the ledger; notes are not counted."""
    step_seconds: float
    """Total time of steps."""
    steps_over_limit: int
    """Steps with rows that generate that took longer than `max_step_ms`."""
    iteration_tokens: tuple[int, ...]
    """Steps by their numbers of tokens, see `StepSizes.counts`."""
    iteration_tokens_sum: int
    """Tokens of all steps."""
    spec_decode_num_drafts: int
    """Rows of steps with guessed tokens."""
    spec_decode_num_draft_tokens: int
    """Tokens that were guessed."""
    spec_decode_num_accepted_tokens: int
    """Guessed tokens that were right."""
    spec_decode_num_accepted_tokens_per_pos: tuple[int, ...]
    """Guessed tokens that were right by their position, one for each of `num_speculative_tokens`; empty if nothing is
    guessed."""
    prefix_cache_host_hits: int = 0
    """The part of `prefix_cache_hits` that came back from host memory."""
    host_cache_blocks: int = 0
    """Pages that host memory holds."""
    host_cache_usage_perc: float = 0.0
    """Share of the host cache that holds pages, 0 to 1."""
    host_cache_bytes: int = 0
    """Host memory that the host cache takes."""
    host_cache_offloads: int = 0
    """Pages that were copied to host memory, or were there when they were evicted."""
    host_cache_returns: int = 0
    """Pages that came back."""
    host_cache_failures: int = 0
    """Pages that could not be copied, in either direction."""
    hisparse_lookups: int = 0
    """Chosen entries of contexts in host memory, those of the last steps perhaps missing."""
    hisparse_misses: int = 0
    """Entries among `hisparse_lookups` that were not hot, and were copied from the host."""
    hisparse_host_bytes: int = 0
    """Host memory that entries take."""
    hisparse_device_bytes: int = 0
    """Device memory that hot entries take."""
