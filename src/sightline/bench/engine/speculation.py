"""How much faster answers come with guessed tokens, by workload: text that quotes its prompt, and text that does not.

Engines with guesses and without answer the same prompts in turns, after a round that does not count. Answers must be
equal. An engine that keeps a corpus has served each text before the rounds that count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from sightline.bench.engine.measure import Agreement, Conditions
from sightline.bench.engine.stepping import check_room, step, submitted
from sightline.bench.engine.work import load_subject, sharing_memory
from sightline.bench.floor import Machine
from sightline.bench.tables import markdown_table
from sightline.core.errors import ConfigError
from sightline.core.metrics import EngineMetrics
from sightline.engine.engine import Engine
from sightline.llm import LLM, EngineSettings

_TEXT = (
    "The committee met on Tuesday to review the proposal. The proposal asks for three new bridges over the river, a "
    "tunnel below the market square, and a tram line to the northern suburbs. The committee approved the bridges and "
    "the tram line, and asked for a new estimate of the cost of the tunnel below the market square. Members of the "
    "public may comment until the end of the month."
)
WORKLOADS: Mapping[str, str] = MappingProxyType(
    {
        "repeat": f"Repeat this text exactly, word for word:\n\n{_TEXT}\n\nHere it is again:\n\nThe committee met on",
        "edit": f"Write this text again with better spelling:\n\n{_TEXT}\n\nThe text with better spelling:\n\n",
        "summary": f"{_TEXT}\n\nSummary: The committee",
        "new text": "A list of unrelated words, none of which comes twice: apple, granite, velocity,",
    }
)
"""Prompts by name, from the most to the least of which an answer quotes."""
TEMPERATURES = (0.0, 0.8)
_HEADING = (
    "text | temperature | tokens/s without | with | speed-up | steps a token | accepted a draft | right guesses | "
    "drafts right up to position 1, 2, …"
)


@dataclass(frozen=True)
class GuessedWork:
    """A workload at a temperature, with guesses and without."""

    name: str
    temperature: float
    num_tokens: int
    plain_seconds: float
    """The best round without guesses."""
    seconds: float
    """The best round with guesses."""
    steps_per_token: float
    mean_accepted: float
    """Right tokens of a draft. Each comes beside the token that its step gives anyway."""
    share: float
    """Share of the guessed tokens that were right."""
    by_position: tuple[float, ...]
    """Share of the drafts whose tokens were right up to each position."""

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.seconds

    def row(self) -> list[str]:
        """The cells of a table row."""
        rates = [f"{self.num_tokens / each:.1f}" for each in (self.plain_seconds, self.seconds)]
        positions = " ".join(f"{each:.0%}" for each in self.by_position)
        numbers = [f"{self.steps_per_token:.2f}", f"{self.mean_accepted:.2f}", f"{self.share:.0%}", positions]
        return [self.name, f"{self.temperature:g}", *rates, f"{self.speedup:.2f}×", *numbers]


@dataclass(frozen=True)
class SpeculationReport:
    """A whole run."""

    conditions: Conditions
    machine: Machine
    speculation: str
    num_iters: int
    works: tuple[GuessedWork, ...]

    def lines(self) -> list[str]:
        """The report as text."""
        return [
            f"{self.conditions}: {self.machine}",
            f"Guesses: {self.speculation}. One request, from its first token on; best of {self.num_iters} rounds.",
            "",
            *markdown_table(_HEADING, [each.row() for each in self.works]),
        ]


def measure_speculation(
    settings: dict[str, object],
    num_tokens: int,
    num_iters: int,
    on_work: Callable[[GuessedWork], None],
    prompts: Mapping[str, Sequence[int]] | None = None,
) -> SpeculationReport:
    """Answers each prompt with both engines, those of `WORKLOADS` without `prompts`. `on_work` receives each result.

    Raises before anything runs if no guesses are asked for, and before anything is reported if answers differ.
    """
    if settings.get("speculative_config") is None:
        raise ConfigError(
            'expected speculative_config, the guesses to measure, got none; add one such as {"method": "ngram"}'
        )
    shared = sharing_memory(settings)
    guessing = load_subject(shared)
    wanted = shared | {"speculative_config": None, "skip_tokenizer_init": True, "prefix_caching": False}
    wanted["model"] = str(guessing.checkpoint.location)
    plain = LLM(**cast("EngineSettings", wanted))
    if prompts is None:
        tokenizer = guessing.checkpoint.load_tokenizer()
        prompts = {name: list(tokenizer.encode_prompt(text)) for name, text in WORKLOADS.items()}
    engines, works = (plain.engine, guessing.llm.engine), list[GuessedWork]()
    for name, prompt in prompts.items():
        for engine in engines:
            check_room(engine, [len(prompt) + num_tokens], "--output-len")
        for temperature in TEMPERATURES:
            rounds = [
                [_answer(engine, prompt, num_tokens, temperature) for engine in engines] for _ in range(num_iters + 1)
            ]
            is_exact = guessing.conditions.is_exact
            Agreement.of([rounds[-1][0].tokens], [rounds[-1][1].tokens]).check(
                "with guesses and without", exact=is_exact
            )
            works.append(_compared(name, temperature, rounds[1:]))
            on_work(works[-1])
    return SpeculationReport(
        conditions=guessing.conditions,
        machine=guessing.floor.machine,
        speculation=str(guessing.llm.engine.runtime.config.speculation),
        num_iters=num_iters,
        works=tuple(works),
    )


@dataclass(frozen=True)
class _Answer:
    """An answer to a prompt, and the time from its first token to its last."""

    tokens: list[int]
    seconds: float
    num_steps: int
    counts: EngineMetrics


def _answer(engine: Engine, prompt: Sequence[int], num_tokens: int, temperature: float) -> _Answer:
    engine.reset_counts()
    with submitted(engine, [list(prompt)], num_tokens, temperature) as [row]:
        while engine.has_work:
            step(engine, [row])
        return _Answer(row.tokens, row.times[-1] - row.times[0], len(set(row.times)) - 1, engine.metrics())


def _compared(name: str, temperature: float, rounds: Sequence[Sequence[_Answer]]) -> GuessedWork:
    """The best round of each engine, and what the last one counted."""
    last = rounds[-1][1]
    counts, num_tokens = last.counts, len(last.tokens) - 1
    drafts, drafted = max(1, counts.spec_decode_num_drafts), max(1, counts.spec_decode_num_draft_tokens)
    return GuessedWork(
        name=name,
        temperature=temperature,
        num_tokens=num_tokens,
        plain_seconds=min(each[0].seconds for each in rounds),
        seconds=min(each[1].seconds for each in rounds),
        steps_per_token=last.num_steps / num_tokens,
        mean_accepted=counts.spec_decode_num_accepted_tokens / drafts,
        share=counts.spec_decode_num_accepted_tokens / drafted,
        by_position=tuple(each / drafts for each in counts.spec_decode_num_accepted_tokens_per_pos),
    )
