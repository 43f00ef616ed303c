"""Speed, measured side by side: every engine runs the same prompts in turns, after it has given the same tokens.

Owns the measuring. Engines are callables that continue prompts of token ids greedily; `peers` makes the other
engines' ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import TypeAlias

from sightline.bench.floor import Machine
from sightline.core.errors import ConfigError, SightlineError
from sightline.core.request import SamplingParams
from sightline.llm import LLM

Prompts: TypeAlias = Sequence[Sequence[int]]
Generate: TypeAlias = Callable[[Prompts, int], list[tuple[int, ...]]]
"""(prompts, number of tokens) to the tokens of each, greedy, ends ignored."""

OURS = "sightline"
CHECKED_TOKENS = 16


class TimedPart(Enum):
    """Which part of a run is timed, and which tokens it counts."""

    PREFILL = "prefill"
    """A run of one token; the prompts' tokens count."""
    DECODE = "decode"
    """A run of all tokens less a run of one; the tokens after the first count."""
    WHOLE = "whole"
    """A run of all tokens; those generated count."""


@dataclass(frozen=True)
class MeasuredWork:
    """What is measured."""

    name: str
    span: TimedPart
    prompts: Prompts
    output_len: int
    floor_seconds: float

    @property
    def num_tokens(self) -> int:
        """Tokens that the work counts."""
        match self.span:
            case TimedPart.PREFILL:
                return sum(len(prompt) for prompt in self.prompts)
            case TimedPart.DECODE:
                return len(self.prompts) * (self.output_len - 1)
            case TimedPart.WHOLE:
                return len(self.prompts) * self.output_len


@dataclass(frozen=True)
class Result:
    """One engine on one piece of work."""

    work: str
    engine: str
    median_seconds: float
    slowest_seconds: float
    tokens_per_second: float
    of_floor: float


@dataclass(frozen=True)
class Agreement:
    """How far an engine's greedy tokens are Sightline's."""

    equal_first: int
    """Prompts whose first token is equal."""
    num_prompts: int
    equal_tokens: int
    """Tokens before the first other one, over all prompts."""
    num_tokens: int

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
    """What every number depends on."""

    model: str
    dtype: str
    quantization: str
    threads: int
    degradations: tuple[str, ...]
    """What of all this is not as it was asked for."""

    def __str__(self) -> str:
        lost = "".join(f"; {degradation}" for degradation in self.degradations)
        return f"{self.model}, {self.dtype}, quantization {self.quantization}, {self.threads} threads{lost}"


@dataclass(frozen=True)
class Report:
    """A whole run."""

    conditions: Conditions
    machine: Machine
    engines: Mapping[str, str]
    """By name: what the engine multiplies with."""
    checked_on: str
    """What the prompts were that the engines had to agree on."""
    agreement: Mapping[str, Agreement]
    """By name, of the others."""
    results: tuple[Result, ...]

    def lines(self) -> list[str]:
        """The report as text."""
        described = [f"- {name}: {runs}" for name, runs in self.engines.items()]
        agreed = [f"- {name}: {agreement}" for name, agreement in self.agreement.items()]
        heading = [f"{self.conditions}, greedy: {self.machine}", "", *described]
        return [
            *heading,
            *(["", f"Same tokens as Sightline on {self.checked_on}:", *agreed] if agreed else []),
            "",
            *table(self.results),
        ]


def sightline_engine(llm: LLM) -> Generate:
    """Sightline as an engine to be measured."""

    def generate(prompts: Prompts, count: int) -> list[tuple[int, ...]]:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        for output in outputs:
            if output.error is not None:
                raise ConfigError(f"expected prompts that can run, got one that cannot: {output.error}")
        return [output.outputs[0].token_ids for output in outputs]

    return generate


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens, the same for every engine."""
    order = Random(seed)
    return [[order.randrange(vocab_size // 2, vocab_size) for _ in range(length)] for length in lengths]


def compare_tokens(
    engines: Mapping[str, Generate], prompts: Prompts, end_tokens: frozenset[int]
) -> dict[str, Agreement]:
    """How far each other engine's tokens are those of the first one.

    A prompt's comparison ends where the first engine gives an end token: some engines never do when told to ignore
    ends, and what follows is then another text.
    """
    answers = {name: generate(prompts, CHECKED_TOKENS) for name, generate in engines.items()}
    ours = [_before_end(tokens, end_tokens) for tokens in answers.pop(next(iter(engines)))]
    if not any(ours):
        raise SightlineError(
            "expected prompts that the model continues, got an end token at once for all; use another model"
        )
    return {name: _agreement(ours, theirs) for name, theirs in answers.items()}


def check_agreement(agreement: Mapping[str, Agreement], *, exact: bool) -> None:
    """Raises where an engine's tokens are others': the speed of a wrong answer is not reported.

    Where roundings differ (not `exact`), tokens may part after a while, but most prompts' first ones must be equal.
    """
    for name, found in agreement.items():
        if exact and not found.is_full:
            raise SightlineError(
                f"expected the same {CHECKED_TOKENS} greedy tokens from {OURS} and {name}, got {found}; "
                "no speed is reported"
            )
        if 2 * found.equal_first <= found.num_prompts:
            raise SightlineError(
                f"expected most first tokens of {OURS} and {name} to be equal, got {found}; no speed is reported"
            )


def measure(engines: Mapping[str, Generate], work: MeasuredWork, rounds: int) -> dict[str, list[float]]:
    """Each engine's seconds on the work, the engines in turns, after one run that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for round_number in range(rounds + 1):
        for name, generate in engines.items():
            spent = _spend(name, generate, work)
            if round_number > 0:
                seconds[name].append(spent)
    return seconds


def summarise(work: MeasuredWork, seconds: Mapping[str, Sequence[float]]) -> list[Result]:
    """Each engine's median, with its rate and its share of the floor."""
    results = []
    for name, times in seconds.items():
        median = statistics.median(times)
        if median <= 0:
            raise SightlineError(
                f"expected {work.output_len} tokens to take {name} longer than one, got {median:.4f} s more; "
                "raise the output length or the number of rounds"
            )
        results.append(
            Result(work.name, name, median, max(times), work.num_tokens / median, work.floor_seconds / median)
        )
    return results


def table(results: Sequence[Result]) -> list[str]:
    """Lines of a Markdown table, with ratios to Sightline."""
    lines = ["| work | engine | tokens/s | Sightline is | of the floor |", "| --- | --- | --- | --- | --- |"]
    ours = {result.work: result.tokens_per_second for result in results if result.engine == OURS}
    for result in results:
        rate, ratio = result.tokens_per_second, ours[result.work] / result.tokens_per_second
        lines.append(f"| {result.work} | {result.engine} | {rate:.1f} | {ratio:.2f}× | {result.of_floor:.0%} |")
    return lines


def _spend(name: str, generate: Generate, work: MeasuredWork) -> float:
    """Seconds of the work's span."""
    match work.span:
        case TimedPart.PREFILL:
            return _run(name, generate, work.prompts, 1)
        case TimedPart.DECODE:
            first = _run(name, generate, work.prompts, 1)
            return _run(name, generate, work.prompts, work.output_len) - first
        case TimedPart.WHOLE:
            return _run(name, generate, work.prompts, work.output_len)


def _run(name: str, generate: Generate, prompts: Prompts, count: int) -> float:
    start = time.perf_counter()
    answers = generate(prompts, count)
    spent = time.perf_counter() - start
    if {len(tokens) for tokens in answers} != {count}:
        raise ConfigError(
            f"expected {count} tokens of every prompt from {name}, got fewer; "
            "lower the output length or raise max_model_len"
        )
    return spent


def _before_end(tokens: Sequence[int], end_tokens: frozenset[int]) -> tuple[int, ...]:
    ends = (index for index, token in enumerate(tokens) if token in end_tokens)
    return tuple(tokens[: next(ends, len(tokens))])


def _agreement(ours: Prompts, theirs: Prompts) -> Agreement:
    compared = [(mine, other) for mine, other in zip(ours, theirs, strict=True) if mine]
    leading = [_num_leading(mine, other) for mine, other in compared]
    return Agreement(sum(map(bool, leading)), len(compared), sum(leading), sum(len(mine) for mine, _ in compared))


def _num_leading(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Equal tokens before the first that differs."""
    differing = (index for index, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
    return next(differing, min(len(ours), len(theirs)))
