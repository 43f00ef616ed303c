"""What a long prompt costs those who are decoding when it arrives.

    |-- rows' prompts --|-- rows decode --|-- rows decode, the long prompt is read in chunks --|-- all decode --|
                                       arrival                                       its first token

Owns the traffic, the times between a row's tokens, and their measure: the time of one step that is full to the token
budget. A row that waits for one such step sees a gap of about that; one that waits for a whole prompt, many times as
much. Steps are seen from outside: how the scheduler fills them is not known here, only how few the prompt needs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from sightline.bench.engine.measure import Agreement, Conditions, Prompts, random_prompts
from sightline.bench.engine.multiturn import answer
from sightline.bench.engine.work import load_subject
from sightline.bench.floor import Machine
from sightline.core.config import Quantization
from sightline.core.errors import ConfigError, SightlineError
from sightline.core.request import SamplingParams
from sightline.engine.engine import Engine

BAR = 2.0
"""Budgeted steps that no gap may exceed."""
STEPS_BEFORE = 16
"""Decode steps of the rows alone, before the prompt arrives."""
TOKENS_AFTER = 4
"""That the long prompt is given behind its first, while the rows go on."""
_HEADING = (
    "| round | budgeted step, ms | gaps before, ms: median, largest | while it is read | largest gap | "
    "first token, s | steps |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)


@dataclass(frozen=True)
class Traffic:
    """The workload, in tokens."""

    rows: int
    """That decode when the long prompt arrives."""
    row_len: int
    """Of each row's prompt."""
    prompt_len: int

    def __str__(self) -> str:
        return f"{self.prompt_len} tokens of prompt arrive among {self.rows} rows that decode from {self.row_len}"


@dataclass(frozen=True)
class ResolvedLimits:
    """The settings that decide what a step is, as they were resolved."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    page_size: int
    cache_tokens: int
    async_scheduling: bool

    def num_steps(self, traffic: Traffic) -> int:
        """The fewest that read the long prompt, where each also gives every row its token."""
        return -(-traffic.prompt_len // self._chunk(traffic))

    def num_full_steps(self, traffic: Traffic) -> int:
        """Of those, the ones with as many tokens as a step may have; the only one where the prompt fills none."""
        return max(1, traffic.prompt_len // self._chunk(traffic))

    def row_tokens(self, traffic: Traffic) -> int:
        """That a row may generate: enough until the end where the prompt is read in twice the fewest steps."""
        reading = -(-traffic.rows * traffic.row_len // self._chunk(traffic))
        return 1 + reading + STEPS_BEFORE + 2 * self.num_steps(traffic) + TOKENS_AFTER

    def _chunk(self, traffic: Traffic) -> int:
        return self.max_num_batched_tokens - traffic.rows

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())


@dataclass(frozen=True)
class Gaps:
    """Times between consecutive tokens of the rows, over all rows."""

    median_seconds: float
    largest_seconds: float

    def __str__(self) -> str:
        return f"{self.median_seconds * 1e3:.0f}, {self.largest_seconds * 1e3:.0f}"


@dataclass(frozen=True)
class Round:
    """The traffic, once."""

    step_seconds: float
    """The median of the budgeted steps."""
    before: Gaps
    during: Gaps
    """From the arrival of the long prompt to its first token."""
    ratio: float
    """The largest gap since the arrival, over one budgeted step."""
    first_token_seconds: float
    """Of the long prompt, from its arrival."""
    num_steps: int
    """From the arrival to that token."""

    def row(self, number: int) -> str:
        """As a line of the table."""
        return (
            f"| {number} | {self.step_seconds * 1e3:.0f} | {self.before} | {self.during} | {self.ratio:.2f}× | "
            f"{self.first_token_seconds:.2f} | {self.num_steps} |"
        )


@dataclass(frozen=True)
class InterferenceReport:
    """A whole run."""

    conditions: Conditions
    machine: Machine
    traffic: Traffic
    limits: ResolvedLimits
    agreement: Agreement
    """Of the answers together and alone, in the round that agrees least."""
    rounds: tuple[Round, ...]
    least_steps: int
    """That the long prompt needs among the rows."""
    ratio: float
    """The worst round's."""
    first_token_seconds: float
    """Of the long prompt: the median."""
    alone_seconds: float
    """The same with nobody beside it."""
    cost: float
    """The former over the latter."""

    def lines(self) -> list[str]:
        """The report as text."""
        return [
            f"{self.conditions}, greedy: {self.machine}",
            f"{self.traffic}; {self.limits}",
            f"Answers together and alone: {self.agreement}",
            "",
            *_HEADING,
            *(each.row(number) for number, each in enumerate(self.rounds, 1)),
            "",
            f"The largest gap is {self.ratio:.2f}× one budgeted step (bar: {BAR:g}×"
            f"{'' if self.ratio <= BAR else ', missed'}). The long prompt's first token comes after "
            f"{self.first_token_seconds:.2f} s, {self.cost:.2f}× the {self.alone_seconds:.2f} s that it takes alone; "
            f"it needs at least {self.least_steps} steps.",
        ]


@dataclass
class Watched:
    """A request, and when its tokens came."""

    request_id: str
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ended: bool = False

    def take(self, engine: Engine, now: float) -> None:
        delta = engine.take_delta(self.request_id)
        if delta is None:
            return
        if delta.error is not None:
            raise SightlineError(f"expected requests that run, got one that failed: {delta.error}")
        self.tokens += delta.token_ids
        self.times += [now] * len(delta.token_ids)
        self.ended = delta.finish_reason is not None

    def gaps(self, start: float, end: float) -> list[float]:
        """Those that lie between the two times, or reach into that span; one that is open ends with `end`."""
        ends = [*self.times[1:], end]
        return [now - last for last, now in zip(self.times, ends, strict=True) if last < min(now, end) and now > start]


def measure_interference(
    settings: dict[str, object], traffic: Traffic, num_rounds: int, on_round: Callable[[int, Round], None]
) -> InterferenceReport:
    """Runs every request alone, then the traffic once to warm up and `num_rounds` times that count.

    Raises before anything runs where the traffic does not fit, and before anything is reported where answers differ.
    """
    subject = load_subject(settings)
    engine, limits = subject.llm.engine, limits_of(subject.llm.engine)
    check_room(limits, traffic)
    prompts = random_prompts([traffic.row_len] * traffic.rows + [traffic.prompt_len], engine.vocab_size)
    expected = [answer(engine, [prompt], limits.row_tokens(traffic))[0].token_ids for prompt in prompts[:-1]]
    alone: list[float] = []
    rounds: list[Round] = []
    agreed: list[Agreement] = []
    for number in range(num_rounds + 1):
        [guest] = answer(engine, prompts[-1:], 1 + TOKENS_AFTER)
        together, measured = run_together(engine, prompts, traffic)
        agreed.append(_agreement([*expected, guest.token_ids], together))
        check_answers(agreed[-1], subject.conditions)
        if number > 0:
            alone.append(guest.first_token_seconds)
            rounds.append(measured)
            on_round(number, measured)
    first_token = statistics.median(each.first_token_seconds for each in rounds)
    alone_seconds = statistics.median(alone)
    return InterferenceReport(
        conditions=subject.conditions,
        machine=subject.floor.machine,
        traffic=traffic,
        limits=limits,
        agreement=min(agreed, key=lambda found: found.equal_tokens),
        rounds=tuple(rounds),
        least_steps=limits.num_steps(traffic),
        ratio=max(each.ratio for each in rounds),
        first_token_seconds=first_token,
        alone_seconds=alone_seconds,
        cost=first_token / alone_seconds,
    )


def limits_of(engine: Engine) -> ResolvedLimits:
    config = engine.runtime.config
    return ResolvedLimits(
        max_num_batched_tokens=config.max_step_tokens,
        max_num_seqs=config.max_rows,
        max_model_len=config.max_model_len,
        page_size=config.page_size,
        cache_tokens=config.cache_tokens,
        async_scheduling=config.async_scheduling,
    )


def check_room(limits: ResolvedLimits, traffic: Traffic) -> None:
    """Raises where the engine cannot run all rows and the long prompt at once, to the end."""
    if traffic.rows >= limits.max_num_seqs:
        raise ConfigError(
            f"expected fewer rows than the {limits.max_num_seqs} sequences that run at once, got {traffic.rows}; "
            "raise --max-num-seqs (and --max-num-batched-tokens, which limits it too), or lower --rows"
        )
    lengths = [traffic.row_len + limits.row_tokens(traffic)] * traffic.rows + [traffic.prompt_len + 1 + TOKENS_AFTER]
    if max(lengths) > limits.max_model_len:
        raise ConfigError(
            f"expected requests of at most {limits.max_model_len} tokens, got {max(lengths)} with the generated ones; "
            "raise --max-model-len (and --cache-tokens, which limits it too), or lower --prompt-len or --row-len"
        )
    needed = sum(-(-length // limits.page_size) * limits.page_size for length in lengths)
    if needed > limits.cache_tokens:
        raise ConfigError(
            f"expected at most {limits.cache_tokens} tokens in the cache at once, got {needed}, in whole pages; "
            "raise --cache-tokens or --memory-fraction, or lower --prompt-len or --rows"
        )


def run_together(engine: Engine, prompts: Prompts, traffic: Traffic) -> tuple[list[list[int]], Round]:
    """The tokens of each prompt, of which the last is the long one, and what was measured."""
    limits = limits_of(engine)
    row_params = SamplingParams(temperature=0.0, max_tokens=limits.row_tokens(traffic), ignore_eos=True)
    guest_params = SamplingParams(temperature=0.0, max_tokens=1 + TOKENS_AFTER, ignore_eos=True)
    watched: list[Watched] = []
    try:
        watched.extend(Watched(engine.submit(prompt, row_params)) for prompt in prompts[:-1])
        while not all(each.tokens for each in watched):
            _step(engine, watched)
        for _ in range(STEPS_BEFORE):
            _step(engine, watched)
        arrival = max(each.times[-1] for each in watched)
        guest = Watched(engine.submit(prompts[-1], guest_params))
        watched.append(guest)
        seconds = []
        while not guest.tokens:
            seconds.append(_step(engine, watched))
        while len(guest.tokens) <= TOKENS_AFTER:
            _step(engine, watched)
    finally:
        for each in watched:
            engine.forget(each.request_id)
    full_step = statistics.median(seconds[: limits.num_full_steps(traffic)])
    return [each.tokens for each in watched], _round(watched, arrival, full_step, len(seconds))


def _round(watched: Sequence[Watched], arrival: float, full_step: float, num_steps: int) -> Round:
    *rows, guest = watched
    if any(row.ended for row in rows):
        raise SightlineError(
            f"expected rows that decode to the end, got one that ended: the long prompt took {num_steps} steps; "
            "raise --cache-tokens"
        )
    first_token, end = guest.times[0], guest.times[-1]
    return Round(
        step_seconds=full_step,
        before=_gaps(rows, max(row.times[0] for row in rows), arrival),
        during=_gaps(rows, arrival, first_token),
        ratio=_gaps(rows, arrival, end).largest_seconds / full_step,
        first_token_seconds=first_token - arrival,
        num_steps=num_steps,
    )


def check_answers(found: Agreement, conditions: Conditions) -> None:
    """Raises where company changes answers; by the same measure as engines are compared with others."""
    exact = conditions.dtype == "float32" and conditions.quantization != Quantization.KEEP.value
    if (exact and not found.is_full) or 2 * found.equal_first <= found.num_prompts:
        raise SightlineError(
            f"expected {'the same' if exact else 'mostly the same'} answers together and alone, got {found}; "
            "nothing is reported"
        )


def _step(engine: Engine, watched: Sequence[Watched]) -> float:
    """One step, its tokens taken; its seconds."""
    if not engine.has_work:
        raise SightlineError("expected a long prompt that is read, got an engine without work")
    start = time.perf_counter()
    engine.step()
    end = time.perf_counter()
    for each in watched:
        each.take(engine, end)
    return end - start


def _gaps(rows: Sequence[Watched], start: float, end: float) -> Gaps:
    seconds = [gap for row in rows for gap in row.gaps(start, end)]
    return Gaps(statistics.median(seconds), max(seconds))


def _agreement(expected: Prompts, given: Prompts) -> Agreement:
    """Of as many tokens as were given."""
    pairs = [list(zip(alone, together, strict=False)) for alone, together in zip(expected, given, strict=True)]
    leading = [next((at for at, (one, other) in enumerate(pair) if one != other), len(pair)) for pair in pairs]
    return Agreement(sum(map(bool, leading)), len(pairs), sum(leading), sum(map(len, pairs)))
