"""Pages that the prefix cache has no room for wait in host memory and come back, and no answer changes for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sightline import LLM, RequestOutput
from sightline.cache.blocks import BlockHash, BlockPlace, TransferEnd, TransferFailed, TransferTicket
from sightline.cache.host import HostBlocks
from sightline.core.errors import ConfigError
from sightline.core.request import SamplingParams
from support.engines import is_at_rest
from support.speculating import GREEDY, PAGE, SCORED, ask, assert_same_answers, tiny
from support.tiny_models import prompts_alike, random_prompts

Folders = Callable[[str], Path]
ROUNDS = [
    prompts_alike(22, 3, 5),
    random_prompts([30, 24, 28], seed=1),
    prompts_alike(22, 3, 5),
    random_prompts([30, 24, 28], seed=1),
]
SHORT = replace(GREEDY, max_tokens=9)
"""Long enough to fill pages of an answer."""
KNOWN = replace(SCORED, max_tokens=SHORT.max_tokens)
LITTLE = {"cache_tokens": 64, "max_model_len": 48, "max_num_seqs": 3, "page_size": PAGE, "host_cache_gib": 8 / 1024}
"""A cache for one prompt and a little more."""
families = pytest.mark.parametrize(
    "family",
    [
        "gemma3",
        *[pytest.param(name, marks=pytest.mark.prove) for name in ("llama", "gpt_oss", "deepseek_v3")],
        *[pytest.param(name, marks=pytest.mark.prove) for name in ("qwen3_next", "kimi_linear")],
        *[pytest.param(name, marks=pytest.mark.prove) for name in ("deepseek_v32", "glm_moe_dsa", "deepseek_v4")],
    ],
)


def expected(folder: Path, rounds: Sequence[list[list[int]]] = ROUNDS) -> list[list[RequestOutput]]:
    """The answers without a cache, one prompt at a time."""
    llm = tiny(folder, prefix_caching=False, max_num_seqs=1)
    return [ask(llm, KNOWN, prompts) for prompts in rounds]


def require_returns(llm: LLM) -> None:
    """Blocks went both ways, nothing failed, and nothing is left behind."""
    metrics = llm.engine.metrics()
    assert metrics.host_cache_offloads > 0
    assert metrics.host_cache_returns > 0
    assert metrics.host_cache_failures == 0
    assert 0 < metrics.prefix_cache_host_hits <= metrics.prefix_cache_hits <= metrics.prefix_cache_queries
    assert 0 < metrics.host_cache_usage_perc <= 1
    assert metrics.host_cache_blocks > 0
    assert is_at_rest(llm)


@families
def test_a_cache_that_is_too_small_gets_its_pages_back_and_answers_alike(folders: Folders, family: str) -> None:
    llm = tiny(folders(family), **LITTLE)
    found = 0
    for prompts, answers in zip(ROUNDS, expected(folders(family)), strict=True):
        outputs = ask(llm, SHORT, prompts)
        assert_same_answers(outputs, answers)
        found += sum(output.num_cached_tokens for output in outputs)
    require_returns(llm)
    assert found == llm.engine.metrics().prefix_cache_hits, "requests are told what both tiers gave them"
    without = tiny(folders(family), **LITTLE | {"host_cache_gib": 0.0})
    for prompts in ROUNDS:
        ask(without, SHORT, prompts)
    assert without.engine.metrics().prefix_cache_hits < found, "the tier finds what the cache alone has lost"


@pytest.mark.prove
@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_steps_in_flight_and_chunks_change_no_answer(folders: Folders, family: str) -> None:
    llm = tiny(folders(family), **LITTLE, async_scheduling=True, max_num_batched_tokens=7)
    for prompts, answers in zip(ROUNDS, expected(folders(family)), strict=True):
        assert_same_answers(ask(llm, SHORT, prompts), answers)
    require_returns(llm)


@pytest.mark.prove
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma3"])
def test_the_entries_of_a_drafter_come_back_too(folders: Folders, family: str) -> None:
    drafting = {"method": "draft_model", "model": str(folders(family)), "num_speculative_tokens": 3}
    llm = tiny(folders(family), **LITTLE, speculative_config=drafting)
    for prompts, answers in zip(ROUNDS, expected(folders(family)), strict=True):
        assert_same_answers(ask(llm, SHORT, prompts), answers)
    require_returns(llm)
    metrics = llm.engine.metrics()
    right = metrics.spec_decode_num_accepted_tokens / metrics.spec_decode_num_draft_tokens
    assert right > 0.99, "a drafter that is the model itself is always right, unless it reads other entries"


@pytest.mark.prove
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_several_continuations_share_what_came_back(folders: Folders, family: str) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)
    plain = tiny(folders(family), prefix_caching=False, max_num_seqs=3)
    llm = tiny(folders(family), **LITTLE | {"cache_tokens": 96})
    for prompts in ROUNDS:
        known = [ask(plain, params, [prompt])[0] for prompt in prompts]
        got = ask(llm, params, prompts)
        assert [[each.token_ids for each in output.outputs] for output in got] == [
            [each.token_ids for each in output.outputs] for output in known
        ]
    require_returns(llm)


@pytest.mark.prove
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_whoever_is_retracted_finds_its_own_pages_on_the_host(folders: Folders, family: str) -> None:
    long = replace(GREEDY, max_tokens=34)
    rounds = [random_prompts([9, 12, 6], seed=4), random_prompts([9, 12, 6], seed=5)]
    known = tiny(folders(family), prefix_caching=False, max_num_seqs=1)
    llm = tiny(folders(family), **LITTLE)
    for prompts in rounds * 2:
        assert_same_answers(ask(llm, long, prompts), ask(known, replace(SCORED, max_tokens=34), prompts))
    assert llm.engine.num_retractions > 0
    require_returns(llm)


class Link:
    """The way to host memory. Pages come back when it is told to let them, and every transfer fails if asked."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_held = self.fails = False
        self._coming = set[TransferTicket]()
        self._held: list[tuple[TransferTicket, TransferEnd]] = []
        poll, fetch = HostBlocks.poll, HostBlocks.fetch

        def noted(blocks: HostBlocks, hashes: Sequence[BlockHash], into: Sequence[BlockPlace]) -> TransferTicket:
            ticket = fetch(blocks, hashes, into)
            self._coming.add(ticket)
            return ticket

        def late(blocks: HostBlocks) -> list[tuple[TransferTicket, TransferEnd]]:
            ended = [*self._held, *poll(blocks)]
            self._held = [each for each in ended if self.is_held and each[0] in self._coming]
            told = [each for each in ended if each not in self._held]
            return [(ticket, TransferFailed("as asked")) for ticket, _ in told] if self.fails else told

        patch.setattr(HostBlocks, "fetch", noted)
        patch.setattr(HostBlocks, "poll", late)


ONE = replace(GREEDY, max_tokens=1)
PROMPT, OTHERS = random_prompts([29], seed=3)[0], random_prompts([40, 41], seed=8)


@pytest.fixture
def offloaded(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> tuple[LLM, Link]:
    """An engine that has 28 tokens of `PROMPT` in host memory only, from where no page comes until it is let."""
    link = Link(monkeypatch)
    llm = tiny(folders("gemma3"), **LITTLE)
    for prompt in (PROMPT, *OTHERS):
        ask(llm, ONE, [prompt])
    llm.engine.reset_counts()
    link.is_held = True
    return llm, link


def test_a_request_waits_for_its_pages_and_others_run_meanwhile(offloaded: tuple[LLM, Link]) -> None:
    llm, link = offloaded
    engine = llm.engine
    waits, runs = engine.submit(PROMPT, ONE), engine.submit([5, 6, 7], ONE)
    for _ in range(3):
        engine.step()
    assert engine.is_finished(runs)
    [waiting] = engine._scheduler.running
    assert waiting.returning is not None
    assert not engine.is_finished(waits)
    link.is_held = False
    while engine.has_work:
        engine.step()
    output = engine.pop_output(waits)
    engine.forget(runs)
    assert output.num_cached_tokens == 28
    assert engine.metrics().prefix_cache_host_hits == 28
    assert is_at_rest(llm)


def test_a_prompt_whose_tokens_are_scored_is_computed_whole(offloaded: tuple[LLM, Link]) -> None:
    llm, link = offloaded
    link.is_held = False
    [output] = ask(llm, replace(ONE, prompt_logprobs=1), [PROMPT])
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None
    assert [scores is not None for scores in output.prompt_logprobs] == [False] + [True] * (len(PROMPT) - 1)


def test_tokens_whose_fetch_fails_are_computed_here(offloaded: tuple[LLM, Link], folders: Folders) -> None:
    llm, link = offloaded
    engine = llm.engine
    request = engine.submit(PROMPT, SHORT)
    engine.step()
    link.is_held, link.fails = False, True
    while engine.has_work:
        engine.step()
    output = engine.pop_output(request)
    metrics = engine.metrics()
    assert (output.num_cached_tokens, metrics.prefix_cache_hits, metrics.host_cache_returns) == (0, 0, 0)
    assert metrics.host_cache_failures >= 7
    assert_same_answers([output], ask(tiny(folders("gemma3"), prefix_caching=False), KNOWN, [PROMPT]))
    assert is_at_rest(llm)


def test_a_request_that_is_cancelled_while_its_pages_come_loses_none(offloaded: tuple[LLM, Link]) -> None:
    llm, link = offloaded
    engine = llm.engine
    request = engine.submit(PROMPT, ONE)
    engine.step()
    engine.cancel(request)
    engine.step()
    assert engine.pop_output(request).outputs[0].finish_reason == "abort"
    assert not is_at_rest(llm), "the transfer still fills its pages"
    link.is_held = False
    [output] = ask(llm, ONE, [PROMPT])
    assert output.num_cached_tokens == 28, "host memory still has them"
    assert is_at_rest(llm)


def test_pages_that_come_for_a_row_with_another_owner_change_nothing_of_it(
    offloaded: tuple[LLM, Link], folders: Folders
) -> None:
    llm, link = offloaded
    engine, other = llm.engine, [5, 6, 7]
    cancelled = engine.submit(PROMPT, ONE)
    engine.step()
    [row] = [each.table_row for each in engine._scheduler.running]
    engine.cancel(cancelled)
    request = engine.submit(other, SHORT)
    engine.step()
    assert [each.table_row for each in engine._scheduler.running] == [row]
    link.is_held = False
    while engine.has_work:
        engine.step()
    engine.forget(cancelled)
    assert_same_answers(
        [engine.pop_output(request)], ask(tiny(folders("gemma3"), prefix_caching=False), KNOWN, [other])
    )
    assert is_at_rest(llm)


def test_an_engine_that_is_closed_while_pages_come_gives_them_back(offloaded: tuple[LLM, Link]) -> None:
    llm, _ = offloaded
    llm.engine.submit(PROMPT, ONE)
    llm.engine.step()
    llm.engine.close()
    assert is_at_rest(llm)
    assert llm.engine.metrics().host_cache_blocks == 0


def test_a_host_cache_needs_prefix_caching_and_memory(folders: Folders) -> None:
    with pytest.raises(ConfigError, match="expected prefix_caching with host_cache_gib"):
        tiny(folders("gemma3"), **LITTLE | {"prefix_caching": False})
    with pytest.raises(ConfigError, match="expected a host cache that fits"):
        tiny(folders("gemma3"), **LITTLE | {"host_cache_gib": 60_000.0})
    with pytest.raises(ConfigError, match="expected enable_hisparse or host_cache_gib, got both"):
        tiny(folders("gemma3"), **LITTLE, enable_hisparse=True)
    with pytest.raises(ConfigError, match="at least one block"):
        tiny(folders("gemma3"), **LITTLE | {"host_cache_gib": 1e-7})


def test_other_engines_names_for_it_are_known(folders: Folders) -> None:
    for name in ("kv_offloading_size", "hicache_size"):
        changes = {key: value for key, value in LITTLE.items() if key != "host_cache_gib"} | {name: 8 / 1024}
        llm = tiny(folders("gemma3"), **changes)
        assert llm.engine.runtime.config.host_cache_bytes == 8 << 20


@pytest.mark.parametrize("call", ["put", "fetch"])
def test_a_store_that_raises_leaks_nothing(
    offloaded: tuple[LLM, Link], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    llm, link = offloaded
    link.is_held = False

    def broken(*_: object) -> None:
        raise OSError("the link is down")

    asked = [PROMPT, *random_prompts([28, 28, 28, 28], seed=5)]
    with monkeypatch.context() as patch:
        patch.setattr(HostBlocks, call, broken)
        with pytest.raises(OSError, match="the link is down"):
            ask(llm, ONE, asked)
    while llm.engine.has_work:
        llm.engine.step()
    [output] = ask(llm, ONE, [PROMPT])
    assert len(output.outputs[0].token_ids) == 1


def test_a_state_that_gives_way_to_another_goes_to_host_memory(folders: Folders) -> None:
    """Without its state no page of a hybrid is of use."""
    llm = tiny(folders("qwen3_next"), **LITTLE | {"max_num_seqs": 1, "max_state_checkpoints": 1})
    for prompt in random_prompts([30, 24, 28, 33], seed=1) * 2:
        ask(llm, ONE, [prompt])
    assert llm.engine.metrics().host_cache_returns > 0
    assert llm.engine.metrics().host_cache_failures == 0
