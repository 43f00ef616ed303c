"""Coroutines get the answers that `LLM` gives, whatever they do: many at once, slow, cancelled, aborted, shut down."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch

from sightline import LLM, AsyncLLM, RequestOutput, SamplingParams
from sightline.attention.planner import PlannedBatch
from sightline.core.errors import ConfigError, DeviceFaultError, EngineClosedError, QueueFullError, RequestError
from sightline.llm import EngineSettings, TokensPrompt
from support.embedding_folder import save_embedder
from support.engines import is_at_rest
from support.tiny_models import make_model, random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
PROMPTS: list[TokensPrompt] = [{"prompt_token_ids": prompt} for prompt in random_prompts([3, 20, 7, 11, 5, 9])]
SECONDS = 60.0
_T = TypeVar("_T")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(path)
    return path


def settings(**changes: object) -> EngineSettings:
    return {"skip_tokenizer_init": True, "cache_tokens": 2048, "page_size": 4, "paranoid": True, **changes}


@pytest.fixture
def llm(folder: Path) -> Iterator[AsyncLLM]:
    made = AsyncLLM(str(folder), **settings())
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    outputs = LLM(str(folder), **settings()).generate(PROMPTS, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def run(work: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run(asyncio.wait_for(work, SECONDS))


async def last(outputs: AsyncGenerator[RequestOutput]) -> RequestOutput:
    found = [output async for output in outputs]
    assert [output.finished for output in found] == [False] * (len(found) - 1) + [True]
    return found[-1]


async def at_rest(llm: AsyncLLM) -> bool:
    """True once the engine has nothing left."""
    engine = llm._llm.engine
    while engine._live or engine.has_work:
        await asyncio.sleep(0.001)
    return is_at_rest(llm._llm) and not llm._readings


def test_an_output_grows_to_what_llm_gives(llm: AsyncLLM, expected: list[tuple[int, ...]]) -> None:
    async def work() -> list[RequestOutput]:
        return [output async for output in llm.generate(PROMPTS[0], GREEDY, "mine")]

    found = run(work())
    assert {output.request_id for output in found} == {"mine"}
    tokens = [output.outputs[0].token_ids for output in found]
    assert tokens[-1] == expected[0]
    assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(tokens))
    assert (found[-1].finished, found[-1].outputs[0].finish_reason) == (True, "length")
    assert found[0].params == found[-1].params


def test_a_stream_has_only_what_is_new(llm: AsyncLLM, expected: list[tuple[int, ...]]) -> None:
    async def work() -> list[tuple[int, ...]]:
        return [delta.token_ids async for delta in llm.stream(PROMPTS[0], GREEDY)]

    assert sum(run(work()), ()) == expected[0]


def test_continuations_and_log_probabilities_are_those_of_llm(llm: AsyncLLM, folder: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    [offline] = LLM(str(folder), **settings()).generate(PROMPTS[1], params, use_tqdm=False)
    output = run(last(llm.generate(PROMPTS[1], params)))
    assert [each.token_ids for each in output.outputs] == [each.token_ids for each in offline.outputs]
    assert len(output.outputs[2].logprobs or ()) == 6
    assert len(output.prompt_logprobs or ()) == 20


def test_many_at_once_are_answered_as_alone(llm: AsyncLLM, expected: list[tuple[int, ...]]) -> None:
    async def work() -> list[RequestOutput]:
        return await asyncio.gather(*[last(llm.generate(PROMPTS[index % 6], GREEDY)) for index in range(120)])

    outputs = run(work())
    assert [output.outputs[0].token_ids for output in outputs] == expected * 20


def test_more_than_may_queue_wait_and_none_is_refused(folder: Path, expected: list[tuple[int, ...]]) -> None:
    async def work() -> list[RequestOutput]:
        async with AsyncLLM(str(folder), **settings(max_queued_requests=2, max_num_seqs=2)) as llm:
            return await asyncio.gather(*[last(llm.generate(PROMPTS[index % 6], GREEDY)) for index in range(30)])

    assert [output.outputs[0].token_ids for output in run(work())] == expected * 5


def test_one_that_never_fits_is_refused_at_once_and_holds_nobody_up(
    folder: Path, expected: list[tuple[int, ...]]
) -> None:
    llm = AsyncLLM(str(folder), **settings(max_queued_requests=2))

    async def work() -> tuple[object, ...]:
        async with aclosing(llm.generate(PROMPTS[0], LONG)) as unread:
            await anext(unread)
            too_many = last(llm.generate(PROMPTS[1], SamplingParams(n=3)))
            return tuple(await asyncio.gather(too_many, last(llm.generate(PROMPTS[1], GREEDY)), return_exceptions=True))

    refused, answered = run(work())
    llm.shutdown()
    assert isinstance(refused, QueueFullError)
    assert isinstance(answered, RequestOutput)
    assert answered.outputs[0].token_ids == expected[1]


def test_a_slow_reader_gets_the_rest_at_once_and_holds_nobody_up(llm: AsyncLLM) -> None:
    async def work() -> tuple[int, RequestOutput]:
        async with aclosing(llm.generate(PROMPTS[0], LONG)) as slow:
            await anext(slow)
            await last(llm.generate(PROMPTS[1], LONG))
            rest = [output async for output in slow]
            return len(rest), rest[-1]

    count, output = run(work())
    assert count == 1
    assert len(output.outputs[0].token_ids) == 60


def test_a_generator_that_is_left_ends_its_request(llm: AsyncLLM) -> None:
    async def work() -> bool:
        async with aclosing(llm.generate(PROMPTS[0], LONG, "left")) as outputs:
            async for _ in outputs:
                break
        assert "left" not in llm._readings
        return await at_rest(llm)

    assert run(work())
    assert llm._llm.engine.metrics().request_success == {"abort": 1}


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_task_that_is_cancelled_ends_its_request_and_no_other(
    llm: AsyncLLM, expected: list[tuple[int, ...]], after: int
) -> None:
    async def work() -> RequestOutput:
        tasks = [asyncio.create_task(last(llm.generate(PROMPTS[0], LONG))) for _ in range(4)]
        other = asyncio.create_task(last(llm.generate(PROMPTS[1], GREEDY)))
        for _ in range(after):
            await asyncio.sleep(0.005)
        for task in tasks:
            task.cancel()
        assert [type(each) for each in await asyncio.gather(*tasks, return_exceptions=True)] == [
            asyncio.CancelledError
        ] * 4
        output = await other
        assert await at_rest(llm)
        return output

    assert run(work()).outputs[0].token_ids == expected[1]


def test_cancelling_again_and_again_leaves_nothing_behind(llm: AsyncLLM, expected: list[tuple[int, ...]]) -> None:
    async def impatient(index: int) -> None:
        try:
            async with asyncio.timeout(0.002 * (index % 7)):
                await last(llm.generate(PROMPTS[index % 6], LONG))
        except TimeoutError:
            pass

    async def work() -> RequestOutput:
        await asyncio.gather(*[impatient(index) for index in range(60)])
        assert await at_rest(llm)
        return await last(llm.generate(PROMPTS[2], GREEDY))

    assert run(work()).outputs[0].token_ids == expected[2]


def test_a_request_is_aborted_by_its_name(llm: AsyncLLM) -> None:
    async def work() -> RequestOutput:
        async with aclosing(llm.generate(PROMPTS[0], LONG, "one")) as outputs:
            await anext(outputs)
            await llm.abort("one")
            await llm.abort("unknown")
            found = [output async for output in outputs][-1]
        assert await at_rest(llm)
        return found

    output = run(work())
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) < 60


def test_a_request_that_waits_for_room_is_aborted_too(folder: Path) -> None:
    async def work() -> RequestOutput:
        async with AsyncLLM(str(folder), **settings(max_queued_requests=1, max_num_seqs=1)) as llm:
            others = [asyncio.create_task(last(llm.generate(PROMPTS[0], LONG))) for _ in range(3)]
            await asyncio.sleep(0.02)
            waiting = asyncio.create_task(last(llm.generate(PROMPTS[1], LONG, "waits")))
            await asyncio.sleep(0.02)
            await llm.abort("waits")
            output = await waiting
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            return output

    assert run(work()).outputs[0].finish_reason == "abort"


def test_a_name_in_use_is_refused_and_can_be_used_again(llm: AsyncLLM) -> None:
    async def work() -> None:
        async with aclosing(llm.generate(PROMPTS[0], LONG, "one")) as outputs:
            await anext(outputs)
            with pytest.raises(RequestError, match="expected a request_id that is not in use, got 'one' again"):
                await last(llm.generate(PROMPTS[0], LONG, "one"))
        await last(llm.generate(PROMPTS[0], GREEDY, "one"))

    run(work())


@pytest.mark.parametrize("prompt", [{"prompt_token_ids": [10**6]}, {"prompt_token_ids": []}, "text", 5])
def test_a_request_that_cannot_run_raises_in_its_own_generator(llm: AsyncLLM, prompt: Any) -> None:
    async def work() -> None:
        with pytest.raises(RequestError):
            await last(llm.generate(prompt, GREEDY))
        assert (await last(llm.generate(PROMPTS[0], GREEDY))).error is None

    run(work())


def test_a_step_that_raises_fails_all_that_run_and_the_next_request_works(
    llm: AsyncLLM, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, engine = llm._llm.engine.step, llm._llm.engine
    armed = threading.Event()

    def breaking() -> None:
        if armed.is_set():
            armed.clear()
            raise ArithmeticError("a step broke")
        step()

    monkeypatch.setattr(engine, "step", breaking)

    async def work() -> RequestOutput:
        running = [asyncio.create_task(last(llm.generate(PROMPTS[0], LONG))) for _ in range(3)]
        armed.set()
        failed = await asyncio.gather(*running, return_exceptions=True)
        assert [str(each) for each in failed] == ["a step broke"] * 3
        output = await last(llm.generate(PROMPTS[3], GREEDY))
        assert await at_rest(llm)
        return output

    assert run(work()).outputs[0].token_ids == expected[3]


def test_a_device_that_fails_answers_everybody_and_refuses_the_next(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(planned: PlannedBatch) -> torch.Tensor:
        raise DeviceFaultError("the device is gone")

    async def work() -> list[RequestOutput]:
        monkeypatch.setattr(llm._llm.engine.runtime.runner, "forward", failing)
        outputs = await asyncio.gather(*[last(llm.generate(PROMPTS[index], GREEDY)) for index in range(3)])
        with pytest.raises(EngineClosedError, match="the device is gone"):
            await last(llm.generate(PROMPTS[0], GREEDY))
        return outputs

    for output in run(work()):
        assert output.outputs[0].finish_reason == "error"
        assert "the device is gone" in (output.error or "")


def test_shutting_down_ends_every_generator(folder: Path) -> None:
    async def work() -> None:
        async with AsyncLLM(str(folder), **settings()) as llm:
            running = [asyncio.create_task(last(llm.generate(PROMPTS[0], LONG))) for _ in range(3)]
            unread = llm.generate(PROMPTS[1], LONG)
            await anext(unread)
        for each in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(each, EngineClosedError)
        with pytest.raises(EngineClosedError):
            await last(unread)
        with pytest.raises(EngineClosedError):
            await last(llm.generate(PROMPTS[0], GREEDY))
        llm.shutdown()

    run(work())


def test_threads_and_coroutines_share_one_engine(llm: AsyncLLM, expected: list[tuple[int, ...]]) -> None:
    async def work() -> tuple[list[RequestOutput], list[RequestOutput]]:
        offline = asyncio.to_thread(llm._llm.generate, PROMPTS, GREEDY, use_tqdm=False)
        online = asyncio.gather(*[last(llm.generate(prompt, GREEDY)) for prompt in PROMPTS])
        return await offline, await online

    for outputs in run(work()):
        assert [output.outputs[0].token_ids for output in outputs] == expected


def test_one_after_the_other_in_several_event_loops(llm: AsyncLLM, expected: list[tuple[int, ...]]) -> None:
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert run(last(llm.generate(prompt, GREEDY))).outputs[0].token_ids == tokens


def test_one_that_is_thrown_away_ends_its_thread(folder: Path) -> None:
    llm = AsyncLLM(str(folder), **settings())
    run(last(llm.generate(PROMPTS[0], GREEDY)))
    thread = llm._steps._thread
    assert thread is not None
    assert thread.is_alive()
    del llm
    gc.collect()
    thread.join(SECONDS)
    assert not thread.is_alive()


@pytest.mark.prove
def test_a_program_that_forgets_to_shut_down_ends(folder: Path) -> None:
    code = f"""
import asyncio
from sightline import AsyncLLM, SamplingParams

async def main():
    async for output in llm.generate({{"prompt_token_ids": [1, 2, 3]}}, SamplingParams(max_tokens=100)):
        print("begun", flush=True)
        return

llm = AsyncLLM({str(folder)!r}, skip_tokenizer_init=True, cache_tokens=512)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "begun\n", "")


def test_a_model_that_embeds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a model that generates, got one with task embed"):
        AsyncLLM(str(save_embedder(tmp_path)), **cast("EngineSettings", {"task": "embed"}))
