"""Speed, measured side by side: every engine runs the same prompts in turns, after it has given the same tokens.

Owns the measuring and the floor. Engines are callables that continue prompts of token ids greedily; `peers` makes the
other engines' ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

import torch

from sightline.core.errors import ConfigError, SightlineError
from sightline.core.request import SamplingParams
from sightline.llm import LLM

Prompts: TypeAlias = Sequence[Sequence[int]]
Generate: TypeAlias = Callable[[Prompts, int], list[tuple[int, ...]]]
"""(prompts, number of tokens) to the tokens of each, greedy, ends ignored."""

CHECKED_TOKENS = 16


@dataclass(frozen=True)
class Machine:
    """What this machine can do, measured in the same run."""

    read_bytes_per_second: float
    """By a matrix-vector product."""
    operations_per_second: float
    """By a square product."""


@dataclass(frozen=True)
class Work:
    """What is measured."""

    name: str
    prompts: Prompts
    output_len: int
    floor_seconds: float
    """Its weights read once a step, or its products, whichever takes longer. Experts count as if all were used."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the work counts: those generated, or those read where only one is generated."""
        if self.output_len == 1:
            return sum(len(prompt) for prompt in self.prompts)
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


def measure_machine() -> Machine:
    """Rates of this machine now, in fp32 with torch's threads."""
    matrix, vector, square = torch.ones(1 << 14, 1 << 13), torch.ones(1 << 13), torch.ones(2048, 2048)
    read = min(_timed(lambda: matrix @ vector) for _ in range(5))
    product = min(_timed(lambda: square @ square) for _ in range(5))
    return Machine(matrix.nbytes / read, 2 * 2048**3 / product)


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens, the same for every engine."""
    order = Random(seed)
    return [[order.randrange(vocab_size // 2, vocab_size) for _ in range(length)] for _ in range(count)]


def decode_floor(machine: Machine, num_weights: int, num_bytes: int, rows: int) -> float:
    """Seconds of one step of `rows` rows: its weights read once, or its products."""
    return max(num_bytes / machine.read_bytes_per_second, 2 * num_weights * rows / machine.operations_per_second)


def prefill_floor(machine: Machine, num_layer_weights: int, num_tokens: int) -> float:
    """Seconds of the products of `num_tokens` through the layers; only the last one needs the vocabulary."""
    return 2 * num_layer_weights * num_tokens / machine.operations_per_second


def check_equal(engines: Mapping[str, Generate], prompts: Prompts) -> None:
    """Raises unless all engines give the same greedy tokens: the speed of a wrong answer is not reported."""
    answers = {name: generate(prompts, CHECKED_TOKENS) for name, generate in engines.items()}
    first = next(iter(answers))
    for name, tokens in answers.items():
        if tokens != answers[first]:
            raise SightlineError(
                f"expected the same {CHECKED_TOKENS} greedy tokens from {first} and {name}, got other ones; "
                "no speed is reported"
            )


def measure(engines: Mapping[str, Generate], work: Work, rounds: int) -> list[Result]:
    """Each engine's times on the work, the engines in turns, after one run that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for round_number in range(rounds + 1):
        for name, generate in engines.items():
            start = time.perf_counter()
            answers = generate(work.prompts, work.output_len)
            spent = time.perf_counter() - start
            if {len(tokens) for tokens in answers} != {work.output_len}:
                raise ConfigError(
                    f"expected {work.output_len} tokens of every prompt from {name}, got fewer; "
                    "lower the output length or raise max_model_len"
                )
            if round_number > 0:
                seconds[name].append(spent)
    return [
        Result(
            work=work.name,
            engine=name,
            median_seconds=statistics.median(times),
            slowest_seconds=max(times),
            tokens_per_second=work.num_tokens / statistics.median(times),
            of_floor=work.floor_seconds / statistics.median(times),
        )
        for name, times in seconds.items()
    ]


def table(results: Sequence[Result]) -> list[str]:
    """Lines of a Markdown table, with ratios to the first engine of each work."""
    lines = ["| work | engine | tokens/s | Sightline is | of the floor |", "| --- | --- | --- | --- | --- |"]
    ours = {result.work: result.tokens_per_second for result in results if result.engine == "sightline"}
    for result in results:
        rate, ratio = result.tokens_per_second, ours[result.work] / result.tokens_per_second
        lines.append(f"| {result.work} | {result.engine} | {rate:.1f} | {ratio:.2f}× | {result.of_floor:.0%} |")
    return lines


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
