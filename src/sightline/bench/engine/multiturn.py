"""What the prefix cache spares a chat: users who share a system prompt and come back with their whole history.

    |-- system --|-- question --|-- answer --|-- question --|-- answer --| ...
    |------ prompt of turn 1 ---|
    |------------------ prompt of turn 2 -------------------|

Owns the chat, the count of what could be reused, and the times to the first token. The other measurements run without
prefix caching, because their rounds repeat their prompts; this one is the exception: the same prompts run on an engine
with the cache and on one without, in turns. The reusable tokens are counted from the histories alone: how the cache
finds pages, keeps them and gives them up is not known here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from sightline.bench.engine.measure import Agreement, Conditions, Prompts, random_prompts
from sightline.bench.engine.work import MeasuredEngine, load_subject
from sightline.bench.floor import Machine
from sightline.core.config import EngineConfig, Quantization
from sightline.core.errors import ConfigError, SightlineError
from sightline.core.request import SamplingParams
from sightline.engine.engine import Engine
from sightline.llm import LLM, EngineSettings

AIM = 0.95
"""Of the reusable tokens, the share that should be reused."""
WARM_TOKENS = 2
"""That each request generates before anything is timed."""
_HEADING = (
    "| turn | prompt tokens | reusable | reused | share | first token, ms: median, largest | without cache | sooner |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
)


@dataclass(frozen=True)
class Chat:
    """The workload, in tokens. All users of a turn ask at once."""

    users: int
    turns: int
    system_len: int
    """Of the prompt that all users share."""
    question_len: int
    answer_len: int

    @property
    def longest(self) -> int:
        """A history at its end, the last answer included."""
        return self.system_len + self.turns * (self.question_len + self.answer_len)

    def __str__(self) -> str:
        return (
            f"{self.users} users × {self.turns} turns: {self.system_len} tokens of system prompt, "
            f"{self.question_len} a question, {self.answer_len} an answer"
        )


@dataclass(frozen=True)
class TurnAnswer:
    """What one engine made of one prompt."""

    token_ids: tuple[int, ...]
    first_token_seconds: float
    """From the submission of the turn's requests to the end of the step that gave this one a token."""
    num_cached_tokens: int


@dataclass(frozen=True)
class ComparedTurn:
    """One prompt, answered with the cache and without."""

    prompt_len: int
    reusable: int
    cached: TurnAnswer
    plain: TurnAnswer


@dataclass(frozen=True)
class FirstTokens:
    """Times to the first token of some requests."""

    median_seconds: float
    largest_seconds: float


@dataclass(frozen=True)
class TurnTally:
    """Some requests: those of one turn, or all."""

    prompt_tokens: int
    reusable_tokens: int
    """In whole pages, computed before the turn began; never a prompt's last token."""
    reused_tokens: int
    """As the engine tells it."""
    share: float | None
    """Reused of the reusable; None where nothing is. What a request reused beyond its reusable tokens does not count:
    it cannot make up for what another one missed."""
    with_cache: FirstTokens
    without_cache: FirstTokens
    speedup: float
    """The median without the cache over the median with it."""


@dataclass(frozen=True)
class MultiturnReport:
    """A whole run."""

    conditions: Conditions
    machine: Machine
    chat: Chat
    page_size: int
    agreement: Agreement
    """Of the answers with the cache and without."""
    turns: tuple[TurnTally, ...]
    all_turns: TurnTally

    def lines(self) -> list[str]:
        """The report as text."""
        rows = [*((str(number), tally) for number, tally in enumerate(self.turns, 1)), ("all", self.all_turns)]
        return [
            f"{self.conditions}, greedy: {self.machine}",
            f"{self.chat}; pages of {self.page_size}",
            f"Answers with the prefix cache and without: {self.agreement}",
            "",
            *_HEADING,
            *(_row(name, tally) for name, tally in rows),
            "",
            "Reusable: whole pages computed in earlier turns. Requests of a turn run at once, and none can count on "
            "another; what one finds of another all the same is in the reused tokens and not in the share.",
            "",
            f"Reused {_percent(self.all_turns.share)} of the reusable tokens (aim: {AIM:.0%}); first tokens of turn "
            f"{len(self.turns)} come {self.turns[-1].speedup:.2f}× sooner.",
        ]


def measure_multiturn(settings: dict[str, object], chat: Chat, on_turn: Callable[[int], None]) -> MultiturnReport:
    """Runs the chat on both engines; tells `on_turn` the number of each turn whose answers agree.

    Raises before anything runs where the chat does not fit, and before anything is reported where answers differ.
    """
    plain, cached = _load_both(settings, chat)
    for engine in (plain.llm.engine, cached):
        _warm_up(engine, chat)
    turns: list[list[ComparedTurn]] = []
    for exchanges in _hold(chat, cached, plain.llm.engine):
        turns.append(exchanges)
        agreement = _agreement([each for turn in turns for each in turn])
        _check_answers(agreement, exact=_is_exact(plain.conditions))
        on_turn(len(turns))
    return MultiturnReport(
        conditions=plain.conditions,
        machine=plain.floor.machine,
        chat=chat,
        page_size=cached.runtime.config.page_size,
        agreement=agreement,
        turns=tuple(tally(turn) for turn in turns),
        all_turns=tally([each for turn in turns for each in turn]),
    )


def count_reusable(prompt: Sequence[int], computed: Prompts, page_size: int) -> int:
    """Tokens of the prompt that need not be computed where all of `computed` was, by whole pages.

    The last token of a prompt is always computed: its logits are wanted.
    """
    longest = max((_num_equal(prompt, tokens) for tokens in computed), default=0)
    return min(longest, len(prompt) - 1) // page_size * page_size


def tally(exchanges: Sequence[ComparedTurn]) -> TurnTally:
    """Sums of the tokens, and what the times come to."""
    reusable = sum(each.reusable for each in exchanges)
    found = sum(min(each.reusable, each.cached.num_cached_tokens) for each in exchanges)
    with_cache = _first_tokens([each.cached for each in exchanges])
    without_cache = _first_tokens([each.plain for each in exchanges])
    return TurnTally(
        prompt_tokens=sum(each.prompt_len for each in exchanges),
        reusable_tokens=reusable,
        reused_tokens=sum(each.cached.num_cached_tokens for each in exchanges),
        share=found / reusable if reusable else None,
        with_cache=with_cache,
        without_cache=without_cache,
        speedup=without_cache.median_seconds / with_cache.median_seconds,
    )


def answer(engine: Engine, prompts: Prompts, answer_len: int) -> list[TurnAnswer]:
    """All prompts at once, greedy, ends ignored."""
    params = SamplingParams(temperature=0.0, max_tokens=answer_len, ignore_eos=True)
    seconds: dict[str, float] = {}
    requests: list[str] = []
    start = time.perf_counter()
    try:
        requests.extend(engine.submit(prompt, params) for prompt in prompts)
        while engine.has_work:
            engine.step()
            now = time.perf_counter()
            for request in requests:
                if request not in seconds and engine.take_delta(request) is not None:
                    seconds[request] = now - start
        outputs = [engine.pop_output(request) for request in requests]
    finally:
        for request in requests:
            engine.forget(request)
    for output in outputs:
        if output.error is not None:
            raise SightlineError(f"expected requests that run, got one that failed: {output.error}")
    return [
        TurnAnswer(output.outputs[0].token_ids, seconds[output.request_id], output.num_cached_tokens)
        for output in outputs
    ]


def _hold(chat: Chat, cached: Engine, plain: Engine) -> Iterator[list[ComparedTurn]]:
    """Each turn's exchanges, by user. Both engines read the same histories, with the answers of the cached one."""
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


def _load_both(settings: dict[str, object], chat: Chat) -> tuple[MeasuredEngine, Engine]:
    """The model twice: measured and without the cache, then with it and as large a cache for its pages."""
    asked = cast("float", settings.get("memory_fraction", EngineConfig.memory_fraction))
    # The two share the memory that one would take; an invalid share is refused as it was asked for.
    wanted = settings | {"memory_fraction": EngineConfig(memory_fraction=asked).memory_fraction / 2}
    plain = load_subject(wanted)
    check_room(plain.llm.engine, chat)
    wanted |= {
        "skip_tokenizer_init": True,
        "prefix_caching": True,
        "cache_tokens": plain.llm.engine.runtime.config.cache_tokens,
    }
    wanted.pop("model", None)
    return plain, LLM(str(plain.checkpoint.location), **cast("EngineSettings", wanted)).engine


def check_room(engine: Engine, chat: Chat) -> None:
    """Raises where the engine cannot run all users at once to the end of their last turn."""
    config = engine.runtime.config
    if chat.users > config.max_rows:
        raise ConfigError(
            f"expected at most {config.max_rows} users, as many as run at once, got {chat.users}; "
            "raise --max-num-seqs (and --max-num-batched-tokens, which limits it too), or lower --users"
        )
    if chat.longest > config.max_model_len:
        raise ConfigError(
            f"expected histories of at most {config.max_model_len} tokens, got {chat.longest} in {chat.turns} turns; "
            "raise --max-model-len (and --cache-tokens, which limits it too), or lower --turns"
        )
    needed = chat.users * -(-chat.longest // config.page_size) * config.page_size
    if needed > config.cache_tokens:
        raise ConfigError(
            f"expected at most {config.cache_tokens} tokens in the cache at once, got {needed}: {chat.users} users of "
            f"{chat.longest}, in whole pages; raise --cache-tokens or --memory-fraction, or lower --users or --turns"
        )


def _warm_up(engine: Engine, chat: Chat) -> None:
    """Runs prompts of other tokens, as long as the first ones, and leaves nothing of them in the cache."""
    lengths = [chat.system_len + chat.question_len] * chat.users
    answer(engine, random_prompts(lengths, engine.vocab_size, seed=chat.turns + 1), min(WARM_TOKENS, chat.answer_len))
    if engine.prefixes is not None:
        engine.prefixes.clear()


def _is_exact(conditions: Conditions) -> bool:
    """True where engines differ by rounding too small to change a greedy token, bar a tie."""
    return conditions.dtype == "float32" and conditions.quantization != Quantization.KEEP.value


def _agreement(exchanges: Sequence[ComparedTurn]) -> Agreement:
    leading = [_num_equal(each.cached.token_ids, each.plain.token_ids) for each in exchanges]
    num_tokens = sum(len(each.plain.token_ids) for each in exchanges)
    return Agreement(sum(map(bool, leading)), len(leading), sum(leading), num_tokens)


def _check_answers(found: Agreement, *, exact: bool) -> None:
    """Raises where the cache changes answers; by the same measure as engines are compared with others."""
    if (exact and not found.is_full) or 2 * found.equal_first <= found.num_prompts:
        raise SightlineError(
            f"expected {'the same' if exact else 'mostly the same'} answers with the prefix cache and without, "
            f"got {found}; nothing is reported"
        )


def _num_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Equal tokens before the first that differs."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(tokens), len(others)))


def _first_tokens(answers: Sequence[TurnAnswer]) -> FirstTokens:
    seconds = [each.first_token_seconds for each in answers]
    return FirstTokens(statistics.median(seconds), max(seconds))


def _row(name: str, row: TurnTally) -> str:
    with_cache, without_cache = (
        f"{times.median_seconds * 1e3:.0f}, {times.largest_seconds * 1e3:.0f}"
        for times in (row.with_cache, row.without_cache)
    )
    return (
        f"| {name} | {row.prompt_tokens} | {row.reusable_tokens} | {row.reused_tokens} | {_percent(row.share)} | "
        f"{with_cache} | {without_cache} | {row.speedup:.2f}× |"
    )


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
