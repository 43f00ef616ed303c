"""How much the prefix cache saves in a chat: users share a system prompt and come back with their whole history.

    |-- system --|-- question --|-- answer --|-- question --|-- answer --| ...
    |------ prompt of turn 1 ---|
    |------------------ prompt of turn 2 -------------------|

The same prompts run on an engine with the cache and on one without, in turns. (The other benchmarks disable prefix
caching, because their rounds repeat their prompts.) With a host tier, both engines have the prefix cache, and one has
the tier too: a cache that is too small for all histories shows what the tier saves. Reusable tokens are counted from
the histories alone, independently of how the cache finds, keeps and evicts pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from sightline.bench.engine.measure import Agreement, Conditions, Prompts, num_leading, random_prompts
from sightline.bench.engine.stepping import TimedAnswer, TimeSpread, answer, check_room
from sightline.bench.engine.work import MeasuredEngine, load_subject, sharing_memory
from sightline.bench.floor import Machine
from sightline.bench.tables import NONE, markdown_table
from sightline.core.config import EngineKeywords
from sightline.core.ledger import Ledger
from sightline.engine.engine import Engine
from sightline.llm import EngineSettings
from sightline.opening import build_engine_of

AIM = 0.95
"""Share of the reusable tokens that should be reused."""
WARM_TOKENS = 2
"""Tokens that each warm-up request generates."""
_HEADING = (
    "turn | prompt tokens | reusable | reused | from the host | share | first token, ms: median, largest | reused "
    "without {0} | first token | sooner"
)


@dataclass(frozen=True)
class Chat:
    """The workload, in tokens. All users of a turn ask at once."""

    users: int
    turns: int
    system_len: int
    """Length of the system prompt that all users share."""
    question_len: int
    answer_len: int

    @property
    def longest(self) -> int:
        """Length of a history at its end, the last answer included."""
        return self.system_len + self.turns * (self.question_len + self.answer_len)

    def __str__(self) -> str:
        return (
            f"{self.users} users × {self.turns} turns: {self.system_len} tokens of system prompt, "
            f"{self.question_len} per question, {self.answer_len} per answer"
        )


@dataclass(frozen=True)
class ComparedTurn:
    """One prompt, answered with the cache and without."""

    prompt_len: int
    reusable: int
    cached: TimedAnswer
    plain: TimedAnswer


@dataclass(frozen=True)
class TurnTally:
    """Sums over some requests: those of one turn, or all."""

    prompt_tokens: int
    reusable_tokens: int
    """Tokens in whole pages that were computed before the turn began; never a prompt's last token."""
    reused_tokens: int
    """Cached tokens that the engine reports."""
    share: float | None
    """Share of the reusable tokens that were reused; None without reusable tokens. Tokens that a request reused beyond
    its reusable ones do not count: they cannot make up for what another request missed."""
    host_tokens: int
    """The part of the reused tokens that came back from the host tier."""
    reused_without: int
    """Cached tokens that the other engine reports."""
    with_cache: TimeSpread
    """Times to the first token."""
    without_cache: TimeSpread
    speedup: float
    """The median of the other engine over the median of this one."""

    def row(self, name: str) -> list[str]:
        """The cells of a table row."""
        counts = [self.prompt_tokens, self.reusable_tokens, self.reused_tokens, self.host_tokens]
        times = [str(self.with_cache), str(self.reused_without), str(self.without_cache), f"{self.speedup:.2f}×"]
        return [name, *map(str, counts), _percent(self.share), *times]


@dataclass(frozen=True)
class MultiturnReport:
    """A whole run."""

    conditions: Conditions
    machine: Machine
    chat: Chat
    page_size: int
    agreement: Agreement
    """Answers of the two engines."""
    compared: str
    """What only one of them has."""
    turns: tuple[TurnTally, ...]
    all_turns: TurnTally

    def lines(self) -> list[str]:
        """The report as text."""
        rows = [turn.row(str(number)) for number, turn in enumerate(self.turns, 1)]
        return [
            f"{self.conditions}, greedy: {self.machine}",
            f"{self.chat}; pages of {self.page_size}",
            f"Answers with {self.compared} and without: {self.agreement}",
            "",
            *markdown_table(_HEADING.format(self.compared), [*rows, self.all_turns.row("all")]),
            "",
            "Reusable: whole pages computed in earlier turns. Requests of a turn run at once and cannot count on each "
            "other; what one reuses of another is in the reused tokens and not in the share.",
            "",
            f"Reused {_percent(self.all_turns.share)} of the reusable tokens (aim: {AIM:.0%}); first tokens of turn "
            f"{len(self.turns)} come {self.turns[-1].speedup:.2f}× sooner.",
        ]


def measure_multiturn(
    settings: dict[str, object], chat: Chat, on_turn: Callable[[int], None], model_config: str | None = None
) -> MultiturnReport:
    """Runs the chat on both engines. `on_turn` receives the number of each turn whose answers agree. `model_config`
    names a model with random weights.

    Raises before anything runs if the chat does not fit, and before anything is reported if answers differ.
    """
    compared = "the host tier" if settings.get("host_cache_gib") else "the prefix cache"
    plain, cached = _load_both(settings, chat, model_config)
    for engine in (plain.llm.engine, cached):
        _warm_up(engine, chat)
    turns: list[TurnTally] = []
    every: list[ComparedTurn] = []
    num_host = cached.metrics().prefix_cache_host_hits
    for exchanges in _hold(chat, cached, plain.llm.engine):
        turns.append(tally(exchanges, cached.metrics().prefix_cache_host_hits - num_host))
        num_host += turns[-1].host_tokens
        every += exchanges
        agreement = Agreement.of([each.plain.token_ids for each in every], [each.cached.token_ids for each in every])
        agreement.check(f"with {compared} and without", exact=plain.conditions.is_exact)
        on_turn(len(turns))
    return MultiturnReport(
        conditions=plain.conditions,
        machine=plain.floor.machine,
        chat=chat,
        page_size=cached.runtime.config.page_size,
        agreement=agreement,
        compared=compared,
        turns=tuple(turns),
        all_turns=tally(every, sum(turn.host_tokens for turn in turns)),
    )


def count_reusable(prompt: Sequence[int], computed: Prompts, page_size: int) -> int:
    """Number of the prompt's tokens that need not be computed again if all of `computed` was, in whole pages.

    The last token of a prompt is always computed, because its logits are needed.
    """
    longest = max((num_leading(prompt, tokens) for tokens in computed), default=0)
    return min(longest, len(prompt) - 1) // page_size * page_size


def tally(exchanges: Sequence[ComparedTurn], host_tokens: int = 0) -> TurnTally:
    """Sums the tokens and summarises the times. `host_tokens` of the reused ones came from the host tier."""
    reusable = sum(each.reusable for each in exchanges)
    found = sum(min(each.reusable, each.cached.num_cached_tokens) for each in exchanges)
    with_cache = TimeSpread.of([each.cached.first_token_seconds for each in exchanges])
    without_cache = TimeSpread.of([each.plain.first_token_seconds for each in exchanges])
    return TurnTally(
        prompt_tokens=sum(each.prompt_len for each in exchanges),
        reusable_tokens=reusable,
        reused_tokens=sum(each.cached.num_cached_tokens for each in exchanges),
        share=found / reusable if reusable else None,
        host_tokens=host_tokens,
        reused_without=sum(each.plain.num_cached_tokens for each in exchanges),
        with_cache=with_cache,
        without_cache=without_cache,
        speedup=without_cache.median_seconds / with_cache.median_seconds,
    )


def _hold(chat: Chat, cached: Engine, plain: Engine) -> Iterator[list[ComparedTurn]]:
    """Yields each turn's exchanges, by user. Both engines read the same histories, with the cached engine's answers."""
    vocab_size, page_size = cached.vocab_size, cached.runtime.config.page_size
    [system] = random_prompts([chat.system_len], vocab_size)
    histories = [system] * chat.users
    computed: list[list[int]] = []
    for turn in range(1, chat.turns + 1):
        questions = random_prompts([chat.question_len] * chat.users, vocab_size, seed=turn)
        prompts = [history + question for history, question in zip(histories, questions, strict=True)]
        reusable = [count_reusable(prompt, computed, page_size) for prompt in prompts]
        with_cache = answer(cached, prompts, chat.answer_len)
        without_cache = answer(plain, prompts, chat.answer_len)
        each = zip(prompts, reusable, with_cache, without_cache, strict=True)
        yield [ComparedTurn(len(prompt), count, ours, other) for prompt, count, ours, other in each]
        histories = [[*prompt, *given.token_ids] for prompt, given in zip(prompts, with_cache, strict=True)]
        # The last token of an answer is never run.
        computed = [history[:-1] for history in histories]


def _load_both(settings: dict[str, object], chat: Chat, model_config: str | None) -> tuple[MeasuredEngine, Engine]:
    """Loads the model twice: without the prefix cache, and with it and an equally large cache. With a host tier, the
    first has the prefix cache too, and the histories need not fit at once."""
    has_tier = bool(settings.get("host_cache_gib"))
    without = {name: value for name, value in sharing_memory(settings).items() if name != "host_cache_gib"}
    plain = load_subject(without, model_config, prefix_caching=has_tier)
    check_room(plain.llm.engine, [chat.longest] * (1 if has_tier else chat.users), "--users or --turns")
    wanted = settings | {
        "skip_tokenizer_init": True,
        "prefix_caching": True,
        "cache_tokens": plain.llm.engine.runtime.config.cache_tokens,
    }
    config = EngineKeywords(**cast("EngineSettings", wanted))
    return plain, build_engine_of(config, plain.checkpoint, Ledger(strict=config.strict))


def _warm_up(engine: Engine, chat: Chat) -> None:
    """Runs other prompts of the first turn's length, and leaves nothing of them in the cache."""
    lengths = [chat.system_len + chat.question_len] * chat.users
    answer(engine, random_prompts(lengths, engine.vocab_size, seed=chat.turns + 1), min(WARM_TOKENS, chat.answer_len))
    for each in engine.prefixes:
        each.clear()


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.1%}"
