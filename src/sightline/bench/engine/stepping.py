"""Requests driven step by step: submitted, watched while the engine steps, and forgotten at the end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from sightline.bench.engine.measure import Prompts, random_prompts
from sightline.core.errors import ConfigError, SightlineError
from sightline.core.request import SamplingParams
from sightline.engine.engine import Engine

WARM_STEPS = 2
"""Decode steps before the steps that are timed."""


@dataclass(frozen=True)
class TimeSpread:
    """Median and largest of some times."""

    median_seconds: float
    largest_seconds: float

    @staticmethod
    def of(seconds: Sequence[float]) -> TimeSpread:
        return TimeSpread(statistics.median(seconds), max(seconds))

    def __str__(self) -> str:
        """Both in milliseconds."""
        return f"{self.median_seconds * 1e3:.0f}, {self.largest_seconds * 1e3:.0f}"


@dataclass
class Watched:
    """A request, its tokens and their arrival times."""

    request_id: str
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ended: bool = False

    def take(self, engine: Engine, now: float) -> None:
        """Takes the tokens that the engine has for this request. Raises if the request failed."""
        delta = engine.take_delta(self.request_id)
        if delta is None:
            return
        if delta.error is not None:
            raise SightlineError(f"expected requests that run, got one that failed: {delta.error}")
        self.tokens += delta.token_ids
        self.times += [now] * len(delta.token_ids)
        self.ended = delta.finish_reason is not None

    def gaps(self, start: float, end: float) -> list[float]:
        """Times between tokens that overlap the span from `start` to `end`. A wait without an end lasts until `end`."""
        ends = [*self.times[1:], end]
        return [now - last for last, now in zip(self.times, ends, strict=True) if last < min(now, end) and now > start]


@contextmanager
def submitted(engine: Engine, prompts: Prompts, max_tokens: int, temperature: float = 0.0) -> Iterator[list[Watched]]:
    """Submits prompts that each generate `max_tokens` tokens, greedily without a temperature and always the same with
    one. Forgets them at the end."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=max_tokens, ignore_eos=True)
    watched: list[Watched] = []
    try:
        watched.extend(Watched(engine.submit(prompt, params)) for prompt in prompts)
        yield watched
    finally:
        for each in watched:
            engine.forget(each.request_id)


def step(engine: Engine, watched: Sequence[Watched]) -> float:
    """Runs one step and takes its tokens. Returns the step's seconds."""
    if not engine.has_work:
        raise SightlineError("expected requests that run, got an engine without work")
    [seconds] = step_seconds(engine, 1)
    now = time.perf_counter()
    for each in watched:
        each.take(engine, now)
    return seconds


def step_seconds(engine: Engine, num_steps: int) -> list[float]:
    """Runs steps and returns the seconds of each."""
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    return seconds


@dataclass(frozen=True)
class TimedAnswer:
    """An engine's answer to one prompt."""

    token_ids: tuple[int, ...]
    first_token_seconds: float
    """From the submission of all prompts to the end of the step with this one's first token."""
    num_cached_tokens: int


def answer(engine: Engine, prompts: Prompts, answer_len: int) -> list[TimedAnswer]:
    """Answers all prompts at once, greedily, each with `answer_len` tokens."""
    start = time.perf_counter()
    with submitted(engine, prompts, answer_len) as watched:
        while engine.has_work:
            step(engine, watched)
        outputs = [engine.pop_output(each.request_id) for each in watched]
    return [
        TimedAnswer(tuple(each.tokens), each.times[0] - start, output.num_cached_tokens)
        for each, output in zip(watched, outputs, strict=True)
    ]


@contextmanager
def decoding_rows(engine: Engine, rows: int, context: int, num_steps: int) -> Iterator[list[int]]:
    """Yields once `rows` rows of at least `context` random tokens decode. The body must run exactly `num_steps` steps.

    Yields the number of cached tokens of each row. Rows that have read their prompt decode while others still read
    theirs, so some hold a few more tokens than `context`.
    """
    max_tokens = check_decoding(engine, rows, context, num_steps)
    with submitted(engine, random_prompts([context] * rows, engine.vocab_size), max_tokens) as watched:
        while not all(each.tokens for each in watched):
            step(engine, watched)
        for _ in range(WARM_STEPS):
            step(engine, watched)
        before = sum(len(each.tokens) for each in watched)
        # The last token of each row enters the cache in the next step.
        yield [context + len(each.tokens) - 1 for each in watched]
        for each in watched:
            each.take(engine, time.perf_counter())
        gained = sum(len(each.tokens) for each in watched) - before
        if gained != rows * num_steps:
            raise SightlineError(
                f"expected {rows} rows to gain {num_steps} tokens each, got {gained} in all; "
                "the engine did not run all rows in every step: raise --cache-tokens"
            )


def check_decoding(engine: Engine, rows: int, context: int, num_steps: int) -> int:
    """Returns how many tokens each row may generate in `decoding_rows`. Raises if the engine has no room for them."""
    reading_steps = -(-rows * context // max(1, engine.runtime.config.max_step_tokens - rows))
    max_tokens = 1 + reading_steps + WARM_STEPS + num_steps + 1
    check_room(engine, [context + max_tokens] * rows, "the rows or contexts")
    return max_tokens


def check_room(engine: Engine, lengths: Sequence[int], smaller: str) -> None:
    """Raises if the engine cannot run sequences of these final lengths at once. `smaller` names what to lower."""
    config = engine.runtime.config
    if len(lengths) > config.max_rows:
        raise ConfigError(
            f"expected at most {config.max_rows} sequences at once, got {len(lengths)}; raise --max-num-seqs (and "
            f"--max-num-batched-tokens, which limits it too), or lower {smaller}"
        )
    if max(lengths) > config.max_model_len:
        raise ConfigError(
            f"expected sequences of at most {config.max_model_len} tokens, got {max(lengths)} with the generated ones; "
            f"raise --max-model-len (and --cache-tokens, which limits it too), or lower {smaller}"
        )
    needed = sum(-(-length // config.page_size) * config.page_size for length in lengths)
    if needed > config.cache_tokens:
        raise ConfigError(
            f"expected at most {config.cache_tokens} tokens in the cache at once, got {needed} in whole pages; "
            f"raise --cache-tokens or --memory-fraction, or lower {smaller}"
        )
