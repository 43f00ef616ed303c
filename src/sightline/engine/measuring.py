"""Measures how long an engine's steps take before anybody waits for one, and chooses how long they may be.

Runs a few requests through the engine itself, then leaves nothing of them: no page, no cached prefix, no count. Does
not know what the limit does (`scheduler/pace.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from sightline.core.request import SamplingParams, Terms
from sightline.engine.engine import Engine

LEAST_SECONDS = 0.05
"""No limit is lower than this: text that comes 20 tokens a second is faster than people read."""
STEPS_PER_LIMIT = 4.0
"""The limit in steps of one token. A step costs about that much before its first prompt token, so prompts that are read
beside rows that generate lose about a quarter of their speed to it, and the rows come four times as slowly."""
MOST_SECONDS = 1.0
"""No further step is measured after this time."""
_PROMPT_LEN, _NUM_PROMPTS = 64, 3
_TOKENS = 4
"""Generated from a prompt of one token, by as many steps of one token."""


def choose_limit(engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
    """Measures an engine that has no work, and limits its steps to `STEPS_PER_LIMIT` steps of one token.

    The first step of each kind is not measured: kernels may be compiled in it, which takes seconds. The fastest step
    counts: beside other work, a typical step can take ten times as long as the device needs.
    """
    pace = engine.pace
    if engine.runtime.config.max_model_len < 2:
        return
    pace.max_seconds = math.inf
    _run(engine, 1, 2, clock, math.inf)
    pace.restart()
    end = clock() + MOST_SECONDS
    _run(engine, 1, _TOKENS, clock, end)
    if _PROMPT_LEN * pace.fastest_decode_seconds < MOST_SECONDS:
        _run(engine, _PROMPT_LEN, 1, clock, math.inf)
        pace.restart()
        end = clock() + MOST_SECONDS
        _run(engine, 1, _TOKENS, clock, end)
    for _ in range(_NUM_PROMPTS):
        _run(engine, _PROMPT_LEN, 1, clock, end)
    pace.max_seconds = max(LEAST_SECONDS, STEPS_PER_LIMIT * pace.fastest_decode_seconds)
    engine.reset_counts()


def _run(engine: Engine, prompt_len: int, num_tokens: int, clock: Callable[[], float], end: float) -> None:
    """Runs a request until it is finished or `end` has passed, but at least until a decode step was timed."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=0)
    run_unseen(engine, prompt_len, params, lambda: clock() >= end and engine.pace.has_decoded)


def run_unseen(
    engine: Engine, prompt_len: int, params: SamplingParams, is_enough: Callable[[], bool] = lambda: False
) -> None:
    """Runs a request of the engine's own until it is finished or is enough, and leaves nothing of it but counts.

    Prompt and answer are shortened to what the engine can hold.
    """
    config = engine.runtime.config
    prompt_len = min(prompt_len, config.max_step_tokens, config.max_model_len - 1)
    params = replace(params, max_tokens=min(params.max_tokens or 1, config.max_model_len - prompt_len))
    request_id = engine.submit([0] * prompt_len, params, None, Terms("measuring"))
    while not engine.is_finished(request_id) and not is_enough():
        engine.step()
    engine.forget(request_id)
    while engine.has_work:
        engine.step()
    for each in engine.prefixes:
        each.clear()
