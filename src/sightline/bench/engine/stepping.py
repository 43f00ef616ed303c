"""An engine's decode steps, one at a time: rows that have read their prompts and gain a token each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sightline.bench.engine.measure import random_prompts
from sightline.core.errors import ConfigError, SightlineError
from sightline.core.request import SamplingParams
from sightline.engine.engine import Engine

WARM_STEPS = 2
"""Decode steps before those that count."""


@contextmanager
def decoding_rows(engine: Engine, rows: int, context: int, num_steps: int) -> Iterator[list[int]]:
    """`rows` rows of at least `context` random tokens, read and warm: the next `num_steps` steps must be made inside.

    Gives the rows' tokens in the cache before the first of those steps. Rows that have read their prompt decode
    along while others read theirs, so that they hold a few more.
    """
    check_room(engine, rows, context, num_steps)
    max_tokens = _max_tokens(engine, rows, context, num_steps)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    prompts = random_prompts([context] * rows, engine.vocab_size)
    gained = {engine.submit(prompt, params): 0 for prompt in prompts}
    try:
        while not all(gained.values()):
            _step(engine, gained)
        for _ in range(WARM_STEPS):
            _step(engine, gained)
        before = sum(gained.values())
        # The token that came last enters the cache with the next step.
        yield [context + count - 1 for count in gained.values()]
        _take(engine, gained)
        if sum(gained.values()) - before != rows * num_steps:
            raise SightlineError(
                f"expected {rows} rows to gain {num_steps} tokens each, got {sum(gained.values()) - before} in all; "
                "the engine did not run all rows in every step: raise --cache-tokens"
            )
    finally:
        for request in gained:
            engine.forget(request)


def _step(engine: Engine, gained: dict[str, int]) -> None:
    engine.step()
    _take(engine, gained)


def _take(engine: Engine, gained: dict[str, int]) -> None:
    """Counts the tokens that came since the last time."""
    for request in gained:
        delta = engine.take_delta(request)
        if delta is not None and delta.error is not None:
            raise SightlineError(f"expected rows that run, got one that failed: {delta.error}")
        gained[request] += 0 if delta is None else len(delta.token_ids)


def _max_tokens(engine: Engine, rows: int, context: int, num_steps: int) -> int:
    """Tokens that a row may generate until the last step that counts."""
    reading_steps = -(-rows * context // max(1, engine.runtime.config.max_step_tokens - rows))
    return 1 + reading_steps + WARM_STEPS + num_steps + 1


def check_room(engine: Engine, rows: int, context: int, num_steps: int) -> None:
    """Raises where the engine cannot hold so many rows for so many steps."""
    config = engine.runtime.config
    tokens = context + _max_tokens(engine, rows, context, num_steps)
    if rows > config.max_rows:
        raise ConfigError(f"expected at most {config.max_rows} rows, got {rows}; raise --max-num-seqs")
    if tokens > config.max_model_len:
        raise ConfigError(
            f"expected rows of at most {config.max_model_len} tokens, got {tokens} with the generated ones; "
            "raise --max-model-len or lower the contexts"
        )
    pages = -(-tokens // config.page_size) * rows
    if pages * config.page_size > config.cache_tokens:
        raise ConfigError(
            f"expected at most {config.cache_tokens} tokens in the cache at once, got {rows} rows of {tokens}; "
            "raise --cache-tokens or --memory-fraction, or lower the rows"
        )
