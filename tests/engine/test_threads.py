"""Several threads on one `LLM` get the answers that one thread gets, and the engine refuses a second thread."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import torch

from sightline import LLM, RequestOutput, SamplingParams
from sightline.attention.planner import PlannedBatch
from sightline.core import turns
from sightline.core.errors import EngineClosedError, LaneBusyError, RequestError
from sightline.engine.calls import BatchCall, TextStream
from sightline.llm import EngineSettings, TokensPrompt
from support.embedding_folder import WORDS, save_embedder
from support.engines import is_at_rest
from support.threads import Background, Hold, together, until
from support.tiny_models import make_model, random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
STRESS_SECONDS = 8.0
Tokens = tuple[int, ...]
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def only_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether it was forgotten: who is not woken hangs."""
    monkeypatch.setattr(turns, "CHECK_SECONDS", 1000.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma3")
    make_model("gemma3").save_pretrained(path)
    return path


def tiny(folder: Path, **changes: object) -> LLM:
    settings = {"skip_tokenizer_init": True, "cache_tokens": 2048, "page_size": 4, "paranoid": True, **changes}
    return LLM(str(folder), **cast("EngineSettings", settings))


# Threads take turns before steps are scheduled: both ways are tried, the one that is not the default as a proof.
@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.prove)], ids=["sync", "async"])
def llm(folder: Path, request: pytest.FixtureRequest) -> LLM:
    return tiny(folder, async_scheduling=request.param)


def prompts_of(lengths: list[int]) -> list[TokensPrompt]:
    return [{"prompt_token_ids": prompt} for prompt in random_prompts(lengths)]


def tokens(outputs: list[RequestOutput]) -> list[Tokens]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]


def ask(llm: LLM, prompt: TokensPrompt, params: SamplingParams = GREEDY) -> Tokens:
    [answer] = tokens(llm.generate(prompt, params, use_tqdm=False))
    return answer


def read(stream: TextStream) -> Tokens:
    return tuple(token for delta in stream for token in delta.token_ids)


def hold_step(llm: LLM, patch: pytest.MonkeyPatch) -> Hold:
    """The first forward from here on stops in the middle until it is let go."""
    hold, forward = Hold(), llm.engine.runtime.runner.forward

    def held(planned: PlannedBatch) -> torch.Tensor:
        hold()
        return forward(planned)

    patch.setattr(llm.engine.runtime.runner, "forward", held)
    return hold


def waiting(llm: LLM, count: int) -> Callable[[], bool]:
    """True when so many threads wait for a turn."""
    return lambda: len(llm.shared._turns._queue) == count


def check_at_rest(llm: LLM) -> None:
    llm.engine.step()
    assert not llm.engine.has_work
    assert llm.engine._live == {}
    assert is_at_rest(llm)
    calls = llm.shared._turns
    assert calls._inside is calls._driver is None
    assert not calls._queue
    assert not calls._asleep


@pytest.mark.prove
def test_fifty_calls_of_two_threads_are_answered_as_alone(llm: LLM) -> None:
    prompts = prompts_of([random.Random(index).randrange(2, 30) for index in range(50)])
    expected = [ask(llm, prompt) for prompt in prompts]

    def half(start: int) -> list[Tokens]:
        return [ask(llm, prompt) for prompt in prompts[start::2]]

    even, odd = together([lambda: half(0), lambda: half(1)])
    assert even == expected[::2]
    assert odd == expected[1::2]
    check_at_rest(llm)


@pytest.mark.prove
def test_four_threads_with_a_prompt_each_on_the_default_model() -> None:
    llm = LLM(cache_tokens=1024, max_model_len=128)
    texts = ["The capital of France is", "1, 1, 2, 3, 5,", "Once upon a time", "def fibonacci(n):"]
    params = SamplingParams(temperature=0.0, max_tokens=6)

    def answer(text: str) -> tuple[str, str]:
        [plain] = llm.generate(text, params, use_tqdm=False)
        [chat] = llm.chat([{"role": "user", "content": text}], params, use_tqdm=False)
        return plain.outputs[0].text, chat.outputs[0].text

    expected = [answer(text) for text in texts]
    assert len(set(expected)) == 4
    assert together([lambda text=text: answer(text) for text in texts]) == expected  # type: ignore[misc]
    check_at_rest(llm)


@pytest.mark.prove
def test_two_hundred_embeddings_of_four_threads_are_those_of_one(tmp_path: Path) -> None:
    llm = LLM(str(save_embedder(tmp_path)), task="embed", dtype="float32")
    chance = random.Random(5)
    texts = [" ".join(chance.choices(WORDS, k=chance.randrange(1, 12))) for _ in range(200)]

    def embed(index: int) -> list[float]:
        [output] = llm.embed(texts[index], use_tqdm=False)
        return output.outputs.embedding

    expected = [embed(index) for index in range(200)]
    shares = [range(start, 200, 4) for start in range(4)]
    found = together([lambda share=share: [embed(index) for index in share] for share in shares])  # type: ignore[misc]
    for share, vectors in zip(shares, found, strict=True):
        torch.testing.assert_close(
            torch.tensor(vectors), torch.tensor([expected[index] for index in share]), atol=1e-6, rtol=1e-6
        )


def test_an_embedder_refuses_a_second_thread_and_a_text_embedder_has_it_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(save_embedder(tmp_path)), task="embed")
    [expected] = llm.embed("the cat", use_tqdm=False)
    embedder, hold = llm.embedder.embedder, Hold()
    forward = embedder.runtime.runner.forward

    def held(planned: PlannedBatch) -> torch.Tensor:
        hold()
        return forward(planned)

    monkeypatch.setattr(embedder.runtime.runner, "forward", held)
    first = Background(lambda: llm.embed("the dog", use_tqdm=False), "the first")
    hold.until_entered()
    with pytest.raises(LaneBusyError, match="got MainThread while the first is in it"):
        embedder.step()
    second = Background(lambda: llm.embed("the cat", use_tqdm=False))
    until(lambda: len(llm.embedder._shared._turns._queue) == 1)
    hold.let_go()
    first.result()
    [found] = second.result()
    assert found.outputs.embedding == pytest.approx(expected.outputs.embedding, abs=1e-6)


def test_requests_of_several_threads_run_in_one_batch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of([5, 9, 3, 12])
    expected = [ask(llm, prompt) for prompt in prompts]
    before = llm.engine.metrics().steps
    hold = hold_step(llm, monkeypatch)
    threads = [Background(lambda: ask(llm, prompts[0]))]
    hold.until_entered()
    threads += [Background(lambda prompt=prompt: ask(llm, prompt)) for prompt in prompts[1:]]  # type: ignore[misc]
    until(waiting(llm, 3))
    hold.let_go()
    assert [thread.result() for thread in threads] == expected
    steps = llm.engine.metrics().steps - before
    assert steps <= GREEDY.max_tokens + 3, "three threads join after the first step, and all go on together"  # type: ignore[operator]
    check_at_rest(llm)


def test_streams_are_read_from_two_threads_while_a_third_generates(llm: LLM) -> None:
    prompts = prompts_of([5, 9, 3])
    expected = [ask(llm, prompt, LONG) for prompt in prompts]
    streams = [llm.stream(prompt, LONG) for prompt in prompts[:2]]
    found = together([lambda: read(streams[0]), lambda: read(streams[1]), lambda: ask(llm, prompts[2], LONG)])
    assert found == expected
    check_at_rest(llm)


def test_one_stream_that_two_threads_read_gives_each_piece_once(llm: LLM) -> None:
    [prompt] = prompts_of([7])
    expected = ask(llm, prompt, LONG)
    stream = llm.stream(prompt, LONG)
    parts = together([lambda: read(stream)] * 2)
    assert sorted((*parts[0], *parts[1])) == sorted(expected)
    assert list(stream) == []
    check_at_rest(llm)


def test_a_stream_that_another_thread_closes_ends_for_its_reader(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream(prompts_of([5])[0], LONG)
    next(stream)
    hold = hold_step(llm, monkeypatch)
    reader = Background(lambda: read(stream))
    hold.until_entered()
    closer = Background(stream.close)
    until(waiting(llm, 1))
    hold.let_go()
    closer.result()
    assert len(reader.result()) < 99
    check_at_rest(llm)


@pytest.mark.parametrize("collected", [False, True], ids=["dropped", "in a cycle"])
def test_a_stream_that_is_dropped_in_another_thread_is_ended(llm: LLM, collected: bool) -> None:
    def drop() -> None:
        stream = llm.stream(prompts_of([5])[0], LONG)
        next(stream)
        if collected:
            stream.itself = stream  # type: ignore[attr-defined]
        del stream
        gc.collect()

    together([drop] * 3)
    # In a thread that asks while another collects, `gc.collect` does nothing.
    gc.collect()
    assert llm.engine.has_work
    ask(llm, prompts_of([4])[0])
    check_at_rest(llm)


def test_closing_tells_every_thread_that_waits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = hold_step(llm, monkeypatch)
    stream = llm.stream(prompts_of([5])[0], LONG)
    threads: list[Background[object]] = [Background(lambda: ask(llm, prompts_of([6])[0], LONG))]
    hold.until_entered()
    threads += [Background(lambda: ask(llm, prompts_of([3])[0], LONG)), Background(lambda: read(stream))]
    until(waiting(llm, 2))
    closing = Background(llm.close)
    until(waiting(llm, 3))
    threads.append(Background(lambda: ask(llm, prompts_of([2])[0], LONG)))
    until(waiting(llm, 4))
    hold.let_go()
    closing.result()
    for thread in threads:
        with pytest.raises(EngineClosedError):
            thread.result()
    assert is_at_rest(llm)


def test_what_one_thread_does_wrong_is_its_own_error(llm: LLM) -> None:
    [prompt] = prompts_of([6])
    expected = ask(llm, prompt)

    def wrong() -> str:
        [output] = llm.generate({"prompt_token_ids": []}, use_tqdm=False)
        with pytest.raises(RequestError, match="one for each prompt"):
            llm.generate([prompt, prompt], [GREEDY], use_tqdm=False)
        with pytest.raises(RequestError, match="at least one token"):
            llm.stream({"prompt_token_ids": []})
        with pytest.raises(ZeroDivisionError):
            llm._run([prompt], lambda _: 1 // 0, GREEDY, [], use_tqdm=False)  # type: ignore[arg-type,return-value]
        return str(output.error)

    right = [lambda: [ask(llm, prompt) for _ in range(5)]] * 2
    *answers, error = together([*right, wrong])
    assert answers == [[expected] * 5] * 2
    assert "at least one token" in str(error)
    check_at_rest(llm)


def test_an_error_of_a_step_that_is_nobodys_reaches_everybody(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = hold_step(llm, monkeypatch)
    threads = [Background(lambda: ask(llm, prompts_of([5])[0], LONG))]
    hold.until_entered()
    threads += [Background(lambda: ask(llm, prompts_of([4])[0], LONG)) for _ in range(2)]
    until(waiting(llm, 2))
    schedule, calls = llm.engine._schedule, iter(range(1000))

    def broken() -> Any:
        if next(calls) == 2:
            raise AssertionError("a bug in the scheduler")
        return schedule()

    monkeypatch.setattr(llm.engine, "_schedule", broken)
    hold.let_go()
    for thread in threads:
        with pytest.raises(AssertionError, match="a bug in the scheduler"):
            thread.result()
    check_at_rest(llm)
    assert len(ask(llm, prompts_of([5])[0])) == 8


def test_a_device_that_dies_answers_every_thread(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = hold_step(llm, monkeypatch)

    def answer() -> str | None:
        [output] = llm.generate(prompts_of([5])[0], LONG, use_tqdm=False)
        return output.error

    threads = [Background(answer)]
    hold.until_entered()
    threads += [Background(answer) for _ in range(2)]
    until(waiting(llm, 2))
    forwards = iter(range(1000))
    held = llm.engine.runtime.runner.forward

    def dying(planned: PlannedBatch) -> torch.Tensor:
        if next(forwards) == 3:
            raise torch.AcceleratorError("illegal memory access")
        return held(planned)

    monkeypatch.setattr(llm.engine.runtime.runner, "forward", dying)
    hold.let_go()
    for thread in threads:
        assert "illegal memory access" in str(thread.result())
    with pytest.raises(EngineClosedError):
        ask(llm, prompts_of([5])[0])


@pytest.mark.parametrize("is_first", [True, False], ids=["while it steps", "while it waits"])
def test_ctrl_c_ends_the_main_threads_requests_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    mine, theirs = prompts_of([5, 9])
    expected = ask(llm, theirs, LONG)
    hold = hold_step(llm, monkeypatch)

    def send() -> None:
        until(waiting(llm, 1))
        hold.let_go()
        # The other thread is in the batch by now, or it steps.
        until(lambda: len(llm.engine._live) == 2 and llm.engine.metrics().steps > 12)
        os.kill(os.getpid(), signal.SIGINT)

    def other() -> Tokens:
        if is_first:
            hold.until_entered()
        return ask(llm, theirs, LONG)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread = Background(other, "other")
        if not is_first:
            hold.until_entered()
        before = llm.engine.metrics().steps
        assert before < 200
        sender = Background(send)
        with pytest.raises(KeyboardInterrupt):
            ask(llm, mine, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
        assert len(llm.engine._live) <= 1, "what the main thread asked for is gone when its call ends"
        sender.result()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert thread.result() == expected
    check_at_rest(llm)


def test_threads_that_find_the_queue_full_wait_for_room(folder: Path) -> None:
    llm = tiny(folder, max_num_seqs=2, max_queued_requests=3)
    prompts = prompts_of([4] * 12)
    expected = tokens(tiny(folder).generate(prompts, GREEDY, use_tqdm=False))

    def share(start: int) -> list[Tokens]:
        return tokens(llm.generate(prompts[start::3], GREEDY, use_tqdm=False))

    found = together([lambda start=start: share(start) for start in range(3)])  # type: ignore[misc]
    assert found == [expected[start::3] for start in range(3)]
    assert llm.engine.metrics().requests_refused == 0
    check_at_rest(llm)


def test_a_request_that_never_fits_is_refused_however_busy_others_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny(folder, max_num_seqs=2, max_queued_requests=3)
    hold = hold_step(llm, monkeypatch)
    busy = Background(lambda: ask(llm, prompts_of([5])[0], SamplingParams(max_tokens=200, ignore_eos=True)))
    hold.until_entered()
    refused = Background(lambda: llm.generate(prompts_of([4])[0], SamplingParams(n=4), use_tqdm=False))
    until(waiting(llm, 1))
    hold.let_go()
    [output] = refused.result()
    assert "expected at most 3 sequences to wait, got 4 more" in str(output.error)
    assert not busy.is_done
    assert len(busy.result()) == 200


def test_a_finaliser_that_closes_a_stream_within_a_step_does_not_hang(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream(prompts_of([5])[0], LONG)
    forward = llm.engine.runtime.runner.forward

    def closing(planned: PlannedBatch) -> torch.Tensor:
        logits = forward(planned)
        stream.close()
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runtime.runner, "forward", closing)
        assert len(Background(lambda: ask(llm, prompts_of([6])[0])).result()) == 8
    check_at_rest(llm)


def test_every_thread_works_on_the_stream_that_the_engine_was_built_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, step, forget = threading.local(), llm.engine.step, llm.engine.forget
    steppers = set()

    @contextmanager
    def stream() -> Iterator[None]:
        current.is_set = True
        yield
        current.is_set = False

    def check_step() -> None:
        assert current.is_set
        steppers.add(threading.current_thread())
        step()

    def check_forget(request_id: str) -> None:
        assert current.is_set
        forget(request_id)

    monkeypatch.setattr(llm.shared, "_on_stream", stream)
    monkeypatch.setattr(llm.engine, "step", check_step)
    monkeypatch.setattr(llm.engine, "forget", check_forget)

    def work() -> int:
        llm.stream(prompts_of([4])[0], LONG).close()
        return len(ask(llm, prompts_of([5])[0]))

    assert work() == 8
    assert together([work] * 3) == [8] * 3
    assert len(steppers) > 1
    assert not current.is_set
    monkeypatch.undo()
    check_at_rest(llm)


# Python swallows an interruption that comes while a weak reference's callback runs, and says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.prove
def test_a_storm_of_ctrl_c_harms_no_other_thread(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "CHECK_SECONDS", 0.05)
    prompts = prompts_of([3, 9, 5, 7])
    expected = [ask(llm, prompt) for prompt in prompts]
    stop, raised = threading.Event(), 0

    def interrupt(_number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is BatchCall.run.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back

    def send() -> None:
        chance = random.Random(1)
        while not stop.wait(chance.random() * 0.02):
            os.kill(os.getpid(), signal.SIGINT)

    def work(index: int) -> int:
        calls = 0
        while not stop.is_set():
            found = read(llm.stream(prompts[index], GREEDY)) if calls % 2 else ask(llm, prompts[index])
            assert found == expected[index]
            calls += 1
        return calls

    previous = signal.signal(signal.SIGINT, interrupt)
    others = [Background(lambda index=index: work(index)) for index in range(3)]  # type: ignore[misc]
    sender, end = Background(send), time.monotonic() + STRESS_SECONDS / 4
    try:
        while time.monotonic() < end:
            try:
                assert ask(llm, prompts[3]) == expected[3]
            except KeyboardInterrupt:
                raised += 1
    finally:
        stop.set()
        until(lambda: sender.is_done)
        signal.signal(signal.SIGINT, previous)
    assert all(other.result() > 0 for other in others)
    assert raised > 5
    check_at_rest(llm)


def test_metrics_can_be_read_while_another_thread_steps(llm: LLM) -> None:
    busy = Background(lambda: [ask(llm, prompts_of([5])[0], LONG) for _ in range(3)])
    steps = [0]
    while not busy.is_done:
        metrics = llm.engine.metrics()
        assert 0 <= metrics.kv_cache_usage_perc <= 1
        steps.append(metrics.steps)
        time.sleep(0.001)
    assert steps == sorted(steps)
    assert len(set(steps)) > 2
    assert len(busy.result()) == 3


def test_an_engine_refuses_a_second_thread_and_any_thread_may_cancel(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm.engine
    mine, theirs, left = (engine.submit(prompt["prompt_token_ids"], GREEDY) for prompt in prompts_of([5, 6, 7]))
    hold = hold_step(llm, monkeypatch)
    stepping = Background(engine.step, "stepper")
    hold.until_entered()
    refused: list[Callable[[], object]] = [
        engine.step,
        lambda: engine.submit([1, 2], GREEDY),
        lambda: engine.take_delta(mine),
        lambda: engine.pop_output(mine),
        lambda: engine.forget(mine),
        engine.close,
        lambda: engine.runtime.planner.ensure(cast("PlannedBatch", None)),
    ]
    for work in refused:
        with pytest.raises(LaneBusyError, match=r"in lane 0, got MainThread while stepper is in it; let one thread"):
            work()
    engine.cancel(theirs)
    engine.abandon(left)
    assert (engine.has_work, engine.is_finished(mine)) == (True, False)
    assert engine.params(mine).max_tokens == 8
    assert engine.metrics().num_requests_running == 3
    hold.let_go()
    stepping.result()
    while engine.has_work:
        Background(engine.step).result()
    assert engine.pop_output(mine).outputs[0].token_ids == ask(llm, prompts_of([5])[0])
    assert engine.pop_output(theirs).outputs[0].finish_reason == "abort"
    check_at_rest(llm)


def test_a_call_whose_engine_somebody_else_uses_fails_and_leaves_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llm.engine
    engine.submit([1, 2, 3], GREEDY)
    hold = hold_step(llm, monkeypatch)
    stepping = Background(engine.step)
    hold.until_entered()
    with pytest.raises(LaneBusyError):
        ask(llm, prompts_of([5])[0])
    hold.let_go()
    stepping.result()
    engine.close()
    assert is_at_rest(llm)


def test_a_call_that_is_interrupted_while_somebody_uses_its_engine_leaves_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, step = llm.engine, llm.engine.step
    calls, directly = iter(range(100)), list[Background[None]]()

    def intruded() -> None:
        step()
        if next(calls) == 2:
            hold_again = hold_step(llm, monkeypatch)
            directly.append(Background(step))
            hold_again.until_entered()
            threading.Timer(0.3, hold_again.let_go).start()

    monkeypatch.setattr(engine, "step", intruded)
    with pytest.raises(LaneBusyError):
        ask(llm, prompts_of([5])[0], LONG)
    for each in directly:
        each.result()
    step()
    check_at_rest(llm)


class Mix:
    """Random calls of one thread, each with an answer that is known."""

    def __init__(self, llm: LLM, cases: list[tuple[TokensPrompt, SamplingParams, list[Tokens]]], seed: int) -> None:
        self._llm = llm
        self._cases = cases
        self._chance = random.Random(seed)
        self.counts = dict.fromkeys(("generate", "stream", "close", "drop", "cancel", "late"), 0)

    def run(self, end: float) -> None:
        while time.monotonic() < end:
            kind = self._chance.choice(list(self.counts))
            self.counts[kind] += 1
            getattr(self, f"_{kind}")()

    def _generate(self) -> None:
        chosen = self._chance.choices(self._cases, k=self._chance.randrange(1, 5))
        prompts, params, answers = ([case[place] for case in chosen] for place in range(3))
        outputs = self._llm.generate(
            cast("list[TokensPrompt]", prompts), cast("list[SamplingParams]", params), use_tqdm=False
        )
        assert [[each.token_ids for each in output.outputs] for output in outputs] == answers

    def _started(self) -> tuple[TextStream, list[Tokens]]:
        prompt, params, answers = self._chance.choice(self._cases[:-1])
        return self._llm.stream(prompt, params, priority=self._chance.randrange(3)), answers

    def _stream(self) -> None:
        stream, answers = self._started()
        found: list[Tokens] = [()] * len(answers)
        for delta in stream:
            found[delta.index] += delta.token_ids
        assert found == answers

    def _close(self) -> None:
        stream, _ = self._started()
        next(stream)
        stream.close()
        assert list(stream) == []

    def _drop(self) -> None:
        stream, _ = self._started()
        next(stream)

    def _cancel(self) -> None:
        stream, answers = self._started()
        first = next(stream)
        self._llm.cancel(stream.request_id)
        rest = [delta for delta in stream if delta.index == first.index]
        found = (*first.token_ids, *(token for delta in rest for token in delta.token_ids))
        assert found == answers[first.index][: len(found)]

    def _late(self) -> None:
        prompt, params, answers = self._chance.choice(self._cases)
        [output] = self._llm.generate(prompt, params, timeout=0.02, use_tqdm=False)
        for each, answer in zip(output.outputs, answers, strict=True):
            assert each.token_ids == answer[: len(each.token_ids)]


@pytest.mark.prove
@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_a_storm_of_mixed_calls_is_answered_as_alone(folder: Path, scheduling: str) -> None:
    """Few rows, few pages and a short queue, so that threads meet everywhere."""
    settings = {"max_num_seqs": 4, "max_queued_requests": 64, "cache_tokens": 320, "max_model_len": 64, "seed": 1}
    llm = tiny(folder, async_scheduling=scheduling == "async", max_num_batched_tokens=24, **settings)
    lengths = [3, 17, 30, 8, 24, 5, 12]
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.9, top_k=30, seed=11, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=4, n=3, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0.0, logprobs=2, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=4, ignore_eos=True),
    ]
    alone = tiny(folder)
    cases = []
    for prompt, params in zip(prompts_of(lengths), kinds, strict=True):
        [output] = alone.generate(prompt, params, use_tqdm=False)
        cases.append((prompt, params, [each.token_ids for each in output.outputs]))
    mixes = [Mix(llm, cases, seed) for seed in range(5)]
    end = time.monotonic() + STRESS_SECONDS / 2
    together([lambda mix=mix: mix.run(end) for mix in mixes])  # type: ignore[misc]
    assert all(count > 0 for count in map(sum, zip(*(mix.counts.values() for mix in mixes), strict=True)))
    check_at_rest(llm)


def test_no_thread_is_left_when_all_calls_have_returned(llm: LLM) -> None:
    before = threading.active_count()
    together([lambda: ask(llm, prompts_of([4])[0])] * 3)
    assert threading.active_count() == before
