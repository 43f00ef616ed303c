"""Desks: every job is answered once, by its own result, in its caller's turn, whatever a desk does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from sightline.runner.sampling.logprobs import TokenLogprobs
from sightline.server.desks.forms import tokens
from sightline.server.desks.pool import (
    DeskLostError,
    DeskPool,
    FairQueue,
    JobTimeoutError,
    NoDeskError,
    NoRoomError,
    Ticket,
)
from sightline.server.desks.protocol import (
    Broken,
    Continuation,
    Declined,
    FormName,
    Generated,
    Head,
    Job,
    Order,
    ReadBody,
    Result,
    Setup,
    WriteAnswer,
    WrittenAnswer,
    job_codec,
)
from sightline.server.desks.worker import BodyDesk
from sightline.server.process.frames import unpack_tokens
from sightline.server.process.loop import pack_scores
from sightline.server.process.protocol import Delta, ScoredToken, TokenScore
from support.fake_engine import MAX_MODEL_LEN, VOCAB_SIZE, tokenizer_data
from support.local_front_end import within
from support.serving import fake_serving

T = TypeVar("T")
FAKE_DESK = (sys.executable, str(Path(__file__).parents[1] / "support" / "fake_desk.py"))
SETUP = Setup(
    msgspec.msgpack.encode(tokenizer_data()),
    ("m",),
    VOCAB_SIZE,
    vector_size=None,
    max_model_len=MAX_MODEL_LEN,
    max_cost=10**6,
    allows_unknown=False,
    least_priority=-5,
    log_level="info",
    seconds=10.0,
    max_answer_bytes=10**6,
)


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def read(form: FormName, **fields: object) -> Result:
    return BodyDesk(SETUP).do(ReadBody(7, form, body(**fields)))


# --- one desk ---


def test_a_desk_reads_a_body_into_an_order() -> None:
    order = read(FormName.COMPLETION, prompt=["ab", "c"], n=2, stream=True, user="me")
    assert isinstance(order, Order)
    assert (order.number, order.model, order.n, order.unused) == (7, "m", 2, ("user",))
    assert [unpack_tokens(each) for each in order.prompts] == [(97, 98), (99,)]
    assert order.stream is not None


def test_a_desk_declines_what_the_model_cannot_take() -> None:
    for form, fields in (
        (FormName.COMPLETION, {"prompt": "a" * MAX_MODEL_LEN}),
        (FormName.CHAT, {"messages": [{"role": "user", "content": "a" * MAX_MODEL_LEN}]}),
        (FormName.COMPLETION, {"prompt": [VOCAB_SIZE]}),
        (FormName.TOKENIZE, {}),
        (FormName.DETOKENIZE, {"tokens": [0] * (MAX_MODEL_LEN + 1)}),
    ):
        result = read(form, **fields)
        assert isinstance(result, Declined), form
        assert result.status == 400


def test_lengths_are_checked_before_a_text_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenised: list[int] = []

    def encode(self: object, text: str) -> list[int]:
        tokenised.append(len(text))
        return [1]

    monkeypatch.setattr("sightline.text.tokenizers.tokenizer.Tokenizer.encode_text", encode)
    long = "a" * 10**6
    embedding = BodyDesk(msgspec.structs.replace(SETUP, vector_size=4))
    for desk, form, fields in (
        (BodyDesk(SETUP), FormName.COMPLETION, {"prompt": long}),
        (BodyDesk(SETUP), FormName.COMPLETION, {"prompt": ["a", long]}),
        (BodyDesk(SETUP), FormName.CHAT, {"messages": [{"role": "user", "content": long}]}),
        (BodyDesk(SETUP), FormName.CHAT, {"messages": [{"role": "user", "content": "a", "reasoning_content": long}]}),
        (BodyDesk(SETUP), FormName.TOKENIZE, {"prompt": long}),
        (BodyDesk(SETUP), FormName.TOKENIZE, {"prompt": long, "add_special_tokens": False}),
        (BodyDesk(SETUP), FormName.TOKENIZE, {"messages": [{"role": "user", "content": long}]}),
        (embedding, FormName.EMBED, {"input": long}),
        (embedding, FormName.EMBED, {"input": [long], "truncate_prompt_tokens": -1}),
        (embedding, FormName.SCORE, {"text_1": "a", "text_2": long, "truncate_prompt_tokens": 5}),
        (embedding, FormName.RERANK, {"query": "a", "documents": [long], "truncate_prompt_tokens": 5}),
    ):
        result = desk.do(ReadBody(1, form, body(**fields)))
        assert isinstance(result, Declined), f"a text of any length is tokenised for {form}: {list(fields)}"
        assert "characters" in result.message or "costs" in result.message
    assert max(tokenised, default=0) < 10**5


def test_a_request_whose_results_cannot_be_sent_is_refused_before_the_engine_computes_them() -> None:
    """One report of 256 MiB would have ended the engine process."""
    small = msgspec.structs.replace(SETUP, max_answer_bytes=100 * 3 * 16)
    embedding = msgspec.structs.replace(small, vector_size=400)
    for setup, form, fields, fits in (
        (small, FormName.COMPLETION, {"prompt": "a" * 100, "prompt_logprobs": 2}, True),
        (small, FormName.COMPLETION, {"prompt": "a" * 101, "prompt_logprobs": 2}, False),
        (small, FormName.COMPLETION, {"prompt": ["a" * 60] * 2, "echo": True, "logprobs": 2}, False),
        (small, FormName.CHAT, {"messages": [{"role": "u", "content": "a" * 100}], "prompt_logprobs": 2}, False),
        (embedding, FormName.EMBED, {"input": ["a"] * 3}, True),
        (embedding, FormName.EMBED, {"input": ["a"] * 4}, False),
        (embedding, FormName.RERANK, {"query": "a", "documents": ["a"] * 3}, False),
    ):
        result = BodyDesk(setup).do(ReadBody(1, form, body(**fields)))
        if fits:
            assert isinstance(result, Order), result
        else:
            assert isinstance(result, Declined), result
            assert result.code == "answer_too_large"


class _Panic(BaseException):
    """What a Rust library raises: no `Exception`."""


@pytest.mark.parametrize("error", [ValueError, MemoryError, RecursionError, _Panic, KeyboardInterrupt, SystemExit])
def test_whatever_is_raised_becomes_a_result(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise error("a client's text")

    monkeypatch.setattr(tokens.TokenizeForm, "take", failing)
    result = read(FormName.TOKENIZE, prompt="a")
    assert isinstance(result, Broken)
    assert result.error == error.__name__
    assert "a client's text" not in repr(result)
    assert any("failing" in line for line in result.where)
    assert result.is_last == (error not in (ValueError, RecursionError))


def test_a_job_of_another_kind_of_server_is_a_result_too() -> None:
    assert isinstance(read(FormName.EMBED, input="a"), Broken)
    wrong = WriteAnswer(3, FormName.TOKENIZE, b"", Head("x", 1, "m"), b"")
    assert isinstance(BodyDesk(SETUP).do(wrong), Broken)
    assert isinstance(BodyDesk(SETUP).do(SETUP), Broken)


@pytest.mark.parametrize("form", [FormName.CHAT, FormName.COMPLETION])
def test_tokens_of_a_scored_prompt_have_the_texts_of_the_served_tokenizer(form: FormName) -> None:
    asked = {"prompt": "ab"} if form is FormName.COMPLETION else {"messages": [{"role": "user", "content": "ab"}]}
    desk = BodyDesk(SETUP)
    order = desk.do(ReadBody(1, form, body(**asked, prompt_logprobs=1)))
    assert isinstance(order, Order)
    scores = pack_scores([TokenLogprobs((ord(actual), ord("z")), (-1.0, -0.5), (2, 1)) for actual in "bc"])
    outcome = Generated(3, 1, [Continuation(["d"], num_tokens=1, finish_reason="length")], 0, {0: scores})
    packed = msgspec.msgpack.encode(outcome)
    written = desk.do(WriteAnswer(2, form, order.ticket, Head("x", 1, "m"), packed))
    assert isinstance(written, WrittenAnswer)
    answer = json.loads(written.body)
    positions = (answer if form is FormName.CHAT else answer["choices"][0])["prompt_logprobs"]
    texts = [{int(token): score["decoded_token"] for token, score in each.items()} for each in positions[1:]]
    expected = [{ord(each): each for each in pair} for pair in ("bz", "cz")]
    assert texts == expected, "tokens have the texts of another tokenizer"


def test_pieces_and_scores_of_a_long_answer_stay_whole() -> None:
    continuation, encoder = Continuation(), msgspec.msgpack.Encoder()
    for place in range(1000):
        scored = [ScoredToken(place, [TokenScore(place, -0.5, 1, "é")])]
        delta = Delta(1, 0, f"{place} ", 1, None, None, encoder.encode(scored))
        continuation.count(delta)
        continuation.keep(delta)
    assert continuation.text == "".join(f"{place} " for place in range(1000))
    assert len(continuation.pieces) <= 257, "few objects, however many tokens"
    again = msgspec.msgpack.decode(encoder.encode(continuation), type=Continuation)
    assert [token.offset for token in again.scored_tokens()] == list(range(1000))
    assert again.num_tokens == 1000


# --- the queue ---


def run(work: Callable[[], Awaitable[T]]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(200):
            return await work()

    return asyncio.run(limited())


def ticket(caller: str) -> Ticket:
    return Ticket(caller, lambda number: ReadBody(number, FormName.TOKENIZE, b""), lambda _: True)


def test_callers_take_turns() -> None:
    async def order() -> list[str]:
        queue = FairQueue(8)
        for caller in "aaaabbc":
            queue.put(ticket(caller))
        return [(await queue.take()).caller for _ in range(7)]

    assert run(order) == list("abcabaa"), "callers do not take turns"


def test_one_caller_never_has_all_desks() -> None:
    async def work() -> None:
        queue = FairQueue(1)
        for _ in range(3):
            queue.put(ticket("a"))
        first = await queue.take()
        waiting = asyncio.ensure_future(queue.take())
        await asyncio.sleep(0)
        assert not waiting.done(), "a second desk stays free for another caller"
        queue.put(ticket("b"))
        assert (await waiting).caller == "b"
        queue.done(first)
        assert (await queue.take()).caller == "a"

    run(work)


def test_a_job_whose_client_is_gone_is_passed_over() -> None:
    async def work() -> None:
        queue = FairQueue(1)
        gone, here = ticket("a"), ticket("a")
        queue.put(gone)
        queue.put(here)
        queue.drop(gone)
        taken = await within(queue.take(), "the next job of a caller whose client left")
        assert taken is here, "a job that nobody waits for is done"
        queue.put_back(here)
        queue.put(ticket("a"))
        assert await queue.take() is here, "a job that no desk began keeps its place"

    run(work)


def test_a_body_is_forgotten_when_its_client_is_gone_however_long_its_caller_waits() -> None:
    """The queue kept the bodies of clients that were gone, which no budget counted, until a desk came to them."""

    async def work() -> None:
        async with pool(1, seconds=30.0) as desks:
            long = asyncio.ensure_future(asked(desks, "sleep=20"))
            await asyncio.sleep(0.1)
            bodies = [f"say={index}," + "x" * 1000 for index in range(50)]
            leaving = [asyncio.ensure_future(asked(desks, body)) for body in bodies]
            await asyncio.sleep(0.1)
            for each in leaving:
                each.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
            assert not desks._queue._waiting
            long.cancel()

    run(work)


def test_the_size_of_a_result_is_counted_before_it_is_read() -> None:
    async def work() -> None:
        async with pool(1) as desks:
            sizes: list[int] = []

            def none(size: int) -> bool:
                sizes.append(size)
                return False

            with pytest.raises(NoRoomError):
                await desks.work("a", saying("say=" + "x" * 300_000), none)
            assert len(sizes) == 1
            assert sizes[0] > 300_000
            assert await asked(desks, "say=next") == "next"
            leaving = asyncio.ensure_future(desks.work("a", saying("sleep=0.3,say=secret"), none))
            await asyncio.sleep(0.1)
            leaving.cancel()
            assert await asked(desks, "say=after") == "after"
            assert len(sizes) == 1, "what nobody waits for is counted nowhere: nobody would give the room back"
            assert desks.num_replaced == 0

    run(work)


def test_a_desk_that_ends_while_it_waits_costs_nobody_an_answer() -> None:
    async def work() -> None:
        async with pool(2) as desks:
            for times in range(1, 4):
                while desks.num_ready < 2:
                    await asyncio.sleep(0.05)
                for pid in tuple(desks.pids):
                    os.kill(pid, signal.SIGKILL)
                while desks.num_replaced < 2 * times:
                    await asyncio.sleep(0.005)
                assert await asyncio.gather(*(asked(desks, f"say={index}") for index in range(4))) == list("0123")

    run(work)


def test_jobs_are_answered_if_no_desk_can_be_started() -> None:
    async def work() -> None:
        async with pool(2) as desks:
            desks._command = ("/nonexistent/desk",)
            for pid in tuple(desks.pids):
                os.kill(pid, signal.SIGKILL)
            while desks.num_replaced < 2:
                await asyncio.sleep(0.01)
            for _ in range(2):
                with pytest.raises(NoDeskError):
                    await asked(desks, "say=x")
            desks._command = FAKE_DESK
            while not desks.num_ready:
                await asyncio.sleep(0.05)
            assert await asked(desks, "say=x") == "x"

    run(work)


# --- the pool ---


@asynccontextmanager
async def pool(count: int = 1, *, shared: bool = False, seconds: float = 30.0) -> AsyncIterator[DeskPool]:
    """Desks that do as a body says; see `fake_desk`."""
    desks = DeskPool(count, shared=shared, seconds=seconds, command=FAKE_DESK)
    setup: asyncio.Future[Setup] = asyncio.get_running_loop().create_future()
    setup.set_result(SETUP)
    running = asyncio.ensure_future(desks.run(setup))
    try:
        await desks.until_ready()
        yield desks
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def saying(said: str) -> Callable[[int], Job]:
    return lambda number: ReadBody(number, FormName.TOKENIZE, said.encode())


async def asked(desks: DeskPool, said: str, caller: str = "a") -> str:
    result = await desks.work(caller, saying(said), lambda _: True)
    assert isinstance(result, WrittenAnswer)
    return result.body.decode()


def test_every_job_gets_its_own_result() -> None:
    async def work() -> list[str]:
        async with pool(2) as desks:
            jobs = [asked(desks, f"sleep={index % 3 * 0.01},say={index}", f"key-{index % 3}") for index in range(60)]
            return await asyncio.gather(*jobs)

    assert run(work) == [str(index) for index in range(60)], "a job got another's result"


@pytest.mark.parametrize(
    ("does", "error"),
    [
        pytest.param("hang", JobTimeoutError, marks=pytest.mark.prove),
        *((does, DeskLostError) for does in ("die", "lie", "mumble", "stammer", "shrug")),
    ],
)
def test_a_desk_that_fails_is_replaced_and_its_job_answered(does: str, error: type[Exception]) -> None:
    async def work() -> None:
        async with pool(1, seconds=8.0 if does == "hang" else 30.0) as desks:
            waiting = [asyncio.ensure_future(asked(desks, f"say={index}")) for index in range(3)]
            work = desks.work("b", saying(does), lambda _: True)
            [answer] = await asyncio.gather(
                within(work, "an answer to the job of a desk that fails"), return_exceptions=True
            )
            assert isinstance(answer, error), f"expected {error.__name__} after its desk did {does!r}, got {answer!r}"
            assert await asyncio.gather(*waiting) == ["0", "1", "2"]
            for caller in "ab":
                after = asked(desks, "say=after", caller)
                assert await within(after, f"a desk for caller {caller} after another was replaced") == "after"
            assert desks.num_replaced == 1
            assert len(desks.pids) == 1

    run(work)


def test_the_result_of_a_job_that_nobody_waits_for_goes_to_nobody() -> None:
    async def work() -> None:
        async with pool(1) as desks:
            leaving = asyncio.ensure_future(asked(desks, "sleep=0.3,say=secret"))
            await asyncio.sleep(0.1)
            leaving.cancel()
            assert await asked(desks, "say=mine", "b") == "mine", "a job got the result of one whose client left"
            assert desks.num_replaced == 0

    run(work)


def test_one_callers_long_jobs_do_not_hold_up_anothers() -> None:
    async def work() -> None:
        async with pool(2, shared=True, seconds=30.0) as desks:
            await asyncio.gather(*(asked(desks, "say=warm", caller) for caller in "ab"))
            long = [asyncio.ensure_future(asked(desks, "sleep=20")) for _ in range(5)]
            await asyncio.sleep(0.1)
            assert await asked(desks, "say=b", "b") == "b"
            assert not any(each.done() for each in long)

    run(work)


def test_desks_end_with_the_pool() -> None:
    async def work() -> set[int]:
        async with pool(2) as desks:
            await asked(desks, "say=x")
            return set(desks.pids)

    pids = run(work)
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


# --- a whole server ---


def test_a_panic_is_answered_with_an_id_and_logged() -> None:
    with fake_serving(desk="raise") as server:
        status, answer, headers = server.post("/tokenize", {"prompt": "a"})
        assert status == 500
        assert headers["content-type"] == "application/json"
        said = json.loads(answer)["error"]["message"]
        event = server.wait_for("desk failed")
        assert event["id"] == headers["x-request-id"]
        assert event["id"] in said


def test_a_server_that_ends_answers_the_clients_whose_texts_are_at_desks() -> None:
    with fake_serving(desk="obey", text_seconds=60.0, text_processes=1, drain_seconds=0.5) as server:
        assert server.post("/tokenize", {"prompt": "a"})[0] == 200
        with ThreadPoolExecutor() as clients:
            # One is at the desk, the other waits for it.
            asking = [clients.submit(server.post, "/tokenize", {"prompt": "hang"}) for _ in range(2)]
            time.sleep(0.5)
            assert server.stop() == 0
            for each in asking:
                status, answer, headers = each.result()
                assert (status, json.loads(answer)["error"]["code"]) == (503, "engine_unavailable")
                assert headers["x-request-id"]


def test_a_text_that_takes_too_long_is_refused_and_the_next_one_is_read() -> None:
    with fake_serving(desk="obey", text_seconds=6.0, text_processes=1) as server:
        status, answer, _ = server.post("/tokenize", {"prompt": "hang"})
        assert (status, json.loads(answer)["error"]["code"]) == (400, "text_timeout")
        assert server.get("/health")[0] == 200
        assert server.post("/tokenize", {"prompt": "b"})[0] == 200


def test_a_desk_whose_front_end_is_killed_ends_although_its_job_does_not() -> None:
    """Without the alarm it would compute for ever: the job holds the GIL, and signals of a terminal are ignored."""
    ours, theirs = socket.socketpair()
    code = (
        "import signal, sys, time; from sightline.server.desks import worker; worker.ORPHAN_SECONDS = 0.5;"
        "from sightline.server.desks.forms.tokens import TokenizeForm;"
        "TokenizeForm.take = lambda *_: __import__('re').match('(a+)+$', 'a' * 60 + 'b');"
        "worker.main()"
    )
    command = [sys.executable, "-c", code, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        jobs = job_codec()
        ours.sendall(jobs.encode([msgspec.structs.replace(SETUP, seconds=1.0)]))
        assert ours.recv(4, socket.MSG_WAITALL)
        ours.sendall(jobs.encode([ReadBody(1, FormName.TOKENIZE, body(prompt="a"))]))
        ours.close()
        assert process.wait(30) == -signal.SIGALRM
