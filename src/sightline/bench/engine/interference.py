"""What a long prompt costs the rows that are decoding when it arrives.

    |-- rows' prompts --|-- rows decode --|-- rows decode, the long prompt is read in chunks --|-- all decode --|
                                       arrival                                       its first token

Measures the times between a row's tokens, and compares them with the time of one step that is full to the token budget.
A row that waits for one such step sees a gap of about that length; one that waits for the whole prompt, many times it.
Does not know how the scheduler fills steps, only how few steps the prompt needs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sightline.bench.engine.measure import Agreement, Conditions, Prompts, random_prompts
from sightline.bench.engine.stepping import TimeSpread, Watched, answer, check_room, step, submitted
from sightline.bench.engine.work import load_subject
from sightline.bench.floor import Machine
from sightline.bench.tables import markdown_table
from sightline.core.errors import SightlineError
from sightline.core.resolution import ResolvedConfig
from sightline.engine.engine import Engine

BAR = 2.0
"""Longest allowed gap, in budgeted steps."""
STEPS_BEFORE = 16
"""Decode steps of the rows alone, before the prompt arrives."""
TOKENS_AFTER = 4
"""Tokens that the long prompt generates after its first."""
_HEADING = (
    "round | budgeted step, ms | gaps before, ms: median, largest | during the prompt | largest gap | "
    "first token, s | steps"
)


@dataclass(frozen=True)
class Traffic:
    """The workload, in tokens."""

    rows: int
    """Rows that decode when the long prompt arrives."""
    row_len: int
    """Prompt length of each row."""
    prompt_len: int

    def num_steps(self, budget: int) -> int:
        """Fewest steps of `budget` tokens that read the long prompt, if each also gives every row a token."""
        return -(-self.prompt_len // self._chunk(budget))

    def num_full_steps(self, budget: int) -> int:
        """How many of those steps are full to the token budget; at least 1."""
        return max(1, self.prompt_len // self._chunk(budget))

    def row_tokens(self, budget: int) -> int:
        """Tokens that a row may generate: enough even if the prompt takes twice the fewest steps."""
        reading = -(-self.rows * self.row_len // self._chunk(budget))
        return 1 + reading + STEPS_BEFORE + 2 * self.num_steps(budget) + TOKENS_AFTER

    def _chunk(self, budget: int) -> int:
        return max(1, budget - self.rows)

    def __str__(self) -> str:
        return f"{self.prompt_len} tokens of prompt arrive among {self.rows} rows that decode from {self.row_len}"


@dataclass(frozen=True)
class Round:
    """One run of the traffic."""

    step_seconds: float
    """Median of the budgeted steps."""
    before: TimeSpread
    """Gaps before the long prompt arrived."""
    during: TimeSpread
    """Gaps from its arrival to its first token."""
    ratio: float
    """Largest gap since the arrival, in budgeted steps."""
    first_token_seconds: float
    """Time from the arrival of the long prompt to its first token."""
    num_steps: int
    """Steps from the arrival to that token."""

    def row(self, number: int) -> list[str]:
        """The cells of a table row."""
        gaps = [f"{self.step_seconds * 1e3:.0f}", str(self.before), str(self.during), f"{self.ratio:.2f}×"]
        return [str(number), *gaps, f"{self.first_token_seconds:.2f}", str(self.num_steps)]


@dataclass(frozen=True)
class InterferenceReport:
    """A whole run."""

    conditions: Conditions
    machine: Machine
    traffic: Traffic
    limits: Mapping[str, int]
    """The resolved settings that decide what a step holds."""
    agreement: Agreement
    """Answers together against answers alone, in the round with the least agreement."""
    rounds: tuple[Round, ...]
    least_steps: int
    """Fewest steps that the long prompt needs among the rows."""
    ratio: float
    """The worst round's."""
    first_token_seconds: float
    """Median time to the long prompt's first token."""
    alone_seconds: float
    """The same if nothing else runs."""
    cost: float
    """`first_token_seconds` over `alone_seconds`."""

    def lines(self) -> list[str]:
        """The report as text."""
        return [
            f"{self.conditions}, greedy: {self.machine}",
            f"{self.traffic}; {', '.join(f'{name} {value}' for name, value in self.limits.items())}",
            f"Answers together and alone: {self.agreement}",
            "",
            *markdown_table(_HEADING, [each.row(number) for number, each in enumerate(self.rounds, 1)]),
            "",
            f"The largest gap is {self.ratio:.2f}× one budgeted step (bar: {BAR:g}×"
            f"{'' if self.ratio <= BAR else ', missed'}). The long prompt's first token comes after "
            f"{self.first_token_seconds:.2f} s, {self.cost:.2f}× the {self.alone_seconds:.2f} s that it takes alone; "
            f"it needs at least {self.least_steps} steps.",
        ]


def measure_interference(
    settings: dict[str, object], traffic: Traffic, num_rounds: int, on_round: Callable[[int, Round], None]
) -> InterferenceReport:
    """Runs every request alone, then the traffic once as warm-up and `num_rounds` times that count.

    Raises before anything runs if the traffic does not fit, and before anything is reported if answers differ.
    """
    subject = load_subject(settings)
    engine, config = subject.llm.engine, subject.llm.engine.runtime.config
    row_tokens = traffic.row_tokens(config.max_step_tokens)
    lengths = [traffic.row_len + row_tokens] * traffic.rows + [traffic.prompt_len + 1 + TOKENS_AFTER]
    check_room(engine, lengths, "--rows, --row-len or --prompt-len")
    prompts = random_prompts([traffic.row_len] * traffic.rows + [traffic.prompt_len], engine.vocab_size)
    expected = [answer(engine, [prompt], row_tokens)[0].token_ids for prompt in prompts[:-1]]
    alone: list[float] = []
    rounds: list[Round] = []
    agreed: list[Agreement] = []
    for number in range(num_rounds + 1):
        [guest] = answer(engine, prompts[-1:], 1 + TOKENS_AFTER)
        together, measured = run_together(engine, prompts, traffic)
        agreed.append(Agreement.of(together, [*expected, guest.token_ids]))
        agreed[-1].check("together and alone", exact=subject.conditions.is_exact)
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
        limits=limits_of(config),
        agreement=min(agreed, key=lambda found: found.equal_tokens),
        rounds=tuple(rounds),
        least_steps=traffic.num_steps(config.max_step_tokens),
        ratio=max(each.ratio for each in rounds),
        first_token_seconds=first_token,
        alone_seconds=alone_seconds,
        cost=first_token / alone_seconds,
    )


def limits_of(config: ResolvedConfig) -> dict[str, int]:
    """The resolved settings that decide what a step holds."""
    return {
        "max_num_batched_tokens": config.max_step_tokens,
        "max_num_seqs": config.max_rows,
        "max_model_len": config.max_model_len,
        "page_size": config.page_size,
        "cache_tokens": config.cache_tokens,
        "async_scheduling": config.async_scheduling,
    }


def run_together(engine: Engine, prompts: Prompts, traffic: Traffic) -> tuple[list[list[int]], Round]:
    """Runs all prompts, of which the last is the long one. Returns each one's tokens, and what was measured."""
    budget = engine.runtime.config.max_step_tokens
    with submitted(engine, prompts[:-1], traffic.row_tokens(budget)) as rows:
        while not all(row.tokens for row in rows):
            step(engine, rows)
        for _ in range(STEPS_BEFORE):
            step(engine, rows)
        arrival = max(row.times[-1] for row in rows)
        with submitted(engine, prompts[-1:], 1 + TOKENS_AFTER) as [guest]:
            seconds = []
            while not guest.tokens:
                seconds.append(step(engine, [*rows, guest]))
            while len(guest.tokens) <= TOKENS_AFTER:
                step(engine, [*rows, guest])
    if any(row.ended for row in rows):
        raise SightlineError(
            f"expected rows that decode to the end, got one that ended: the long prompt took {len(seconds)} steps; "
            "raise --cache-tokens"
        )
    full_step = statistics.median(seconds[: traffic.num_full_steps(budget)])
    first_token, end = guest.times[0], guest.times[-1]
    return [each.tokens for each in (*rows, guest)], Round(
        step_seconds=full_step,
        before=_gaps(rows, max(row.times[0] for row in rows), arrival),
        during=_gaps(rows, arrival, first_token),
        ratio=_gaps(rows, arrival, end).largest_seconds / full_step,
        first_token_seconds=first_token - arrival,
        num_steps=len(seconds),
    )


def _gaps(rows: Sequence[Watched], start: float, end: float) -> TimeSpread:
    return TimeSpread.of([gap for row in rows for gap in row.gaps(start, end)])
