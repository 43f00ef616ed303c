"""Speed of several engines: all run the same prompts in turns, after a check that they generate the same tokens.

An engine is a function that continues prompts of token ids greedily. `peers` makes those of other engines.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import TypeAlias

from sightline.bench.floor import Machine
from sightline.bench.tables import markdown_table
from sightline.core.config import Quantization
from sightline.core.errors import ConfigError, SightlineError
from sightline.core.request import SamplingParams
from sightline.llm import LLM

Prompts: TypeAlias = Sequence[Sequence[int]]
Generate: TypeAlias = Callable[[Prompts, int], list[tuple[int, ...]]]
"""(prompts, number of tokens) to the greedy tokens of each prompt; end tokens are ignored."""

OURS = "sightline"
CHECKED_TOKENS = 16


class TimedPart(Enum):
    """Which part of a run is timed, and which tokens count."""

    PREFILL = "prefill"
    """A run of one token; the prompts' tokens count."""
    DECODE = "decode"
    """A run of all tokens less a run of one; the tokens after the first count."""
    WHOLE = "whole"
    """A run of all tokens; the generated tokens count."""


@dataclass(frozen=True)
class MeasuredWork:
    """One piece of work that every engine runs."""

    name: str
    span: TimedPart
    prompts: Prompts
    output_len: int
    floor_seconds: float

    @property
    def num_tokens(self) -> int:
        """Number of tokens that count."""
        if self.span is TimedPart.PREFILL:
            return sum(len(prompt) for prompt in self.prompts)
        return len(self.prompts) * (self.output_len - (self.span is TimedPart.DECODE))


@dataclass(frozen=True)
class Result:
    """The times of one engine on one piece of work."""

    work: str
    engine: str
    median_seconds: float
    slowest_seconds: float
    tokens_per_second: float
    of_floor: float


@dataclass(frozen=True)
class Agreement:
    """How many greedy tokens of two runs are equal."""

    equal_first: int
    """Prompts whose first token is equal."""
    num_prompts: int
    equal_tokens: int
    """Tokens before the first different one, summed over all prompts."""
    num_tokens: int

    @staticmethod
    def of(reference: Prompts, other: Prompts) -> Agreement:
        """Compares the tokens of each prompt with its reference. An empty reference does not count."""
        compared = [(one, two) for one, two in zip(reference, other, strict=True) if one]
        leading = [num_leading(one, two) for one, two in compared]
        return Agreement(sum(map(bool, leading)), len(compared), sum(leading), sum(len(one) for one, _ in compared))

    def check(self, between: str, *, exact: bool) -> None:
        """Raises if the tokens differ, because the speed of a wrong answer is not reported.

        If rounding may differ (not `exact`), later tokens may differ too, but most first tokens must be equal.
        """
        if (exact and not self.is_full) or 2 * self.equal_first <= self.num_prompts:
            raise SightlineError(
                f"expected {'the same' if exact else 'mostly the same'} greedy tokens {between}, got {self}; "
                "nothing is reported"
            )

    @property
    def is_full(self) -> bool:
        return self.equal_tokens == self.num_tokens

    def __str__(self) -> str:
        return (
            f"{self.equal_first} of {self.num_prompts} first tokens and "
            f"{self.equal_tokens} of {self.num_tokens} leading tokens equal"
        )


@dataclass(frozen=True)
class Conditions:
    """The conditions of a measurement."""

    model: str
    dtype: str
    quantization: str
    threads: int
    degradations: tuple[str, ...]
    """Deviations from the requested settings."""

    @property
    def is_exact(self) -> bool:
        """Whether rounding differences are too small to change a greedy token, except in a tie."""
        return self.dtype == "float32" and self.quantization != Quantization.KEEP.value

    def __str__(self) -> str:
        lost = "".join(f"; {degradation}" for degradation in self.degradations)
        return f"{self.model}, {self.dtype}, quantization {self.quantization}, {self.threads} threads{lost}"


@dataclass(frozen=True)
class Report:
    """A whole run."""

    conditions: Conditions
    machine: Machine
    engines: Mapping[str, str]
    """By name: the weights and cache that the engine uses."""
    checked_on: str
    """The kind of prompts on which the engines had to agree."""
    agreement: Mapping[str, Agreement]
    """How far each other engine agrees with Sightline, by name."""
    results: tuple[Result, ...]

    def lines(self) -> list[str]:
        """The report as text."""
        agreed = [f"- {name}: {agreement}" for name, agreement in self.agreement.items()]
        return [
            f"{self.conditions}, greedy: {self.machine}",
            "",
            *(f"- {name}: {runs}" for name, runs in self.engines.items()),
            *(["", f"Same tokens as Sightline on {self.checked_on}:", *agreed] if agreed else []),
            "",
            *table(self.results),
        ]


def sightline_engine(llm: LLM) -> Generate:
    """Sightline as an engine to measure."""

    def generate(prompts: Prompts, count: int) -> list[tuple[int, ...]]:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        for output in outputs:
            if output.error is not None:
                raise ConfigError(f"expected prompts that can run, got one that cannot: {output.error}")
        return [output.outputs[0].token_ids for output in outputs]

    return generate


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens; equal for equal arguments."""
    order = Random(seed)
    return [[order.randrange(vocab_size // 2, vocab_size) for _ in range(length)] for length in lengths]


def compare_tokens(
    engines: Mapping[str, Generate], prompts: Prompts, end_tokens: frozenset[int]
) -> dict[str, Agreement]:
    """Compares the tokens of each other engine with those of the first.

    A comparison ends at the first engine's end token: some engines never generate one if told to ignore ends, and what
    follows differs.
    """
    answers = {name: generate(prompts, CHECKED_TOKENS) for name, generate in engines.items()}
    ours = [
        list(itertools.takewhile(lambda token: token not in end_tokens, tokens))
        for tokens in answers.pop(next(iter(engines)))
    ]
    if not any(ours):
        raise SightlineError(
            "expected prompts that the model continues, got an end token at once for all; use another model"
        )
    return {name: Agreement.of(ours, theirs) for name, theirs in answers.items()}


def measure(engines: Mapping[str, Generate], work: MeasuredWork, rounds: int) -> dict[str, list[float]]:
    """Returns each engine's seconds per round. Engines take turns, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for round_number in range(rounds + 1):
        for name, generate in engines.items():
            spent = _spend(name, generate, work)
            if round_number > 0:
                seconds[name].append(spent)
    return seconds


def summarise(work: MeasuredWork, seconds: Mapping[str, Sequence[float]]) -> list[Result]:
    """Returns each engine's median, rate and share of the floor."""
    results = []
    for name, times in seconds.items():
        median = statistics.median(times)
        if median <= 0:
            raise SightlineError(
                f"expected {name} to take longer for {work.output_len} tokens than for one, got {median:.4f} s more; "
                "raise the output length or the number of rounds"
            )
        results.append(
            Result(work.name, name, median, max(times), work.num_tokens / median, work.floor_seconds / median)
        )
    return results


def table(results: Sequence[Result]) -> list[str]:
    """Lines of a Markdown table, with ratios to Sightline."""
    ours = {result.work: result.tokens_per_second for result in results if result.engine == OURS}
    rows = []
    for result in results:
        rate, ratio = result.tokens_per_second, ours[result.work] / result.tokens_per_second
        rows.append([result.work, result.engine, f"{rate:.1f}", f"{ratio:.2f}×", f"{result.of_floor:.0%}"])
    return markdown_table("work | engine | tokens/s | Sightline is | of the floor", rows)


def _spend(name: str, generate: Generate, work: MeasuredWork) -> float:
    """Seconds of the timed part."""
    if work.span is TimedPart.PREFILL:
        return _run(name, generate, work.prompts, 1)
    first = _run(name, generate, work.prompts, 1) if work.span is TimedPart.DECODE else 0.0
    return _run(name, generate, work.prompts, work.output_len) - first


def _run(name: str, generate: Generate, prompts: Prompts, count: int) -> float:
    start = time.perf_counter()
    answers = generate(prompts, count)
    spent = time.perf_counter() - start
    if {len(tokens) for tokens in answers} != {count}:
        raise ConfigError(
            f"expected {count} tokens for every prompt from {name}, got fewer; "
            "lower the output length or raise max_model_len"
        )
    return spent


def num_leading(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Number of equal tokens before the first difference."""
    equal = (one == other for one, other in zip(tokens, others, strict=False))
    return sum(itertools.takewhile(bool, equal))
