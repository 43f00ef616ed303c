"""The front end as a whole: every request gets its own answer, nothing is left held, and callers do not see each other.

In one process, so that what is held can be looked at; see `local_front_end`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sightline.server.desks.protocol import ReadBody
from sightline.server.http.limits import Limits
from sightline.server.process.protocol import TOKEN_SCORE_BYTES
from sightline.server.process.window import FIRST_UNREAD_BYTES, MAX_UNREAD_BYTES, MAX_UNREAD_REPORTS, UnreadLimit
from sightline.server.serve import memory_bound
from support import local_front_end as local
from support.fake_engine import MAX_MODEL_LEN, MAX_ROWS
from support.local_front_end import MAX_QUEUED, Client, LocalFrontEnd, local_front_end, within

KEYS = ("first-key-1", "second-key-2")
FIRST, SECOND = KEYS
CAPACITY = MAX_ROWS + MAX_QUEUED
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(200):
            await work()

    asyncio.run(limited())


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def settle() -> None:
    """Lets everything that can happen at once happen."""
    for _ in range(50):
        await asyncio.sleep(0)


# --- whose answer it is ---


def test_every_request_is_answered_from_its_own_order_and_its_own_ticket() -> None:
    async def work() -> None:
        async with local_front_end(text_processes=3, api_keys=KEYS) as front_end:
            asked: list[tuple[Client, str]] = []
            for index, key in zip(range(4), itertools.cycle(KEYS)):
                text, echo = chr(ord("a") + index) * (index + 1), index % 2 == 0
                fields = {"prompt": text, "max_tokens": 2, "echo": echo}
                asked.append((front_end.ask(COMPLETIONS, fields, key), text * (3 if echo else 2)))
            for client, expected in asked:
                answer = await client.answer()
                got = answer.value["choices"][0]["text"]
                assert got == expected, f"another request's answer: expected {expected}, got {got}"
            assert front_end.is_at_rest, front_end.held

    run(work)


def test_streams_that_run_together_have_their_own_texts() -> None:
    async def work() -> None:
        async with local_front_end() as front_end:
            clients = {
                text: front_end.ask(COMPLETIONS, {"prompt": text, "max_tokens": 100, "stream": True}) for text in "abc"
            }
            for text, client in clients.items():
                answer = await client.answer()
                assert answer.is_done
                got = "".join(event["choices"][0]["text"] for event in answer.events)
                assert got == text * 100, f"another request's answer: expected 100 of {text}, got {got}"

    run(work)


def test_whoever_waits_is_told_when_the_engine_process_is_lost() -> None:
    async def work() -> None:
        async with local_front_end() as front_end:
            front_end.engine.holds = True
            fields: dict[str, Any] = {"messages": said("a"), "max_tokens": 9}
            whole, stream = front_end.ask(CHAT, fields), front_end.ask(CHAT, fields | {"stream": True})
            await settle()
            front_end.engine.die()
            answer = await whole.answer()
            assert (answer.status, answer.value["error"]["code"]) == (503, "engine_unavailable")
            answer = await stream.answer()
            assert answer.events[-1]["error"]["code"] == "engine_unavailable"
            assert not answer.is_done
            front_end.engine.waiting.clear()
            assert front_end.is_at_rest, front_end.held

    run(work)


# --- what is held ---


REFUSED: tuple[tuple[bool, str, dict[str, object]], ...] = (
    (False, CHAT, {"messages": said("a" * MAX_MODEL_LEN)}),
    (False, CHAT, {"messages": said("a"), "model": "another"}),
    (False, COMPLETIONS, {"prompt": "a", "temperature": -1}),
    (False, COMPLETIONS, {"prompt": "a", "n": CAPACITY + 1}),
    (False, COMPLETIONS, {"prompt": "a" * MAX_MODEL_LEN, "stream": True}),
    (False, "/tokenize", {}),
    (False, "/detokenize", {"tokens": [10**6]}),
    (True, "/v1/embeddings", {"input": "a" * 2 * MAX_MODEL_LEN}),
    (True, "/v1/score", {"text_1": ["a", "b"], "text_2": "c"}),
    (True, "/v1/rerank", {"query": "a", "documents": ["a" * 2 * MAX_MODEL_LEN]}),
)


@pytest.mark.parametrize("embeds", [False, True])
def test_a_refused_body_leaves_nothing_held(embeds: bool) -> None:
    async def work() -> None:
        async with local_front_end(local.opened(embeds=embeds)) as front_end:
            for _, path, fields in (each for each in REFUSED if each[0] is embeds):
                for _ in range(CAPACITY + 1):
                    answer = await front_end.ask(path, fields).answer()
                    assert answer.status in (400, 404), f"{path}: {answer.body!r}"
                    assert front_end.is_at_rest, f"a refused body of {path} leaves {front_end.held}"

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_in_any_phase_leaves_nothing_held(stream: bool) -> None:
    async def work() -> None:
        async with local_front_end(text_processes=1) as front_end:
            desks, engine = front_end.desks, front_end.engine
            for desk_works, engine_holds, reads in ((False, False, True), (True, True, True), (True, False, False)):
                for _ in range(CAPACITY + 1):
                    engine.holds = engine_holds
                    (desks.works.set if desk_works else desks.works.clear)()
                    client = front_end.ask(CHAT, {"messages": said("a"), "max_tokens": 99, "stream": stream})
                    (client.reads.set if reads else client.reads.clear)()
                    await settle()
                    assert not client.is_answered
                    await client.leave()
                    assert front_end.is_at_rest, f"a client that left leaves {front_end.held}"
            desks.works.set()
            engine.holds = False
            assert (await front_end.ask("/tokenize", {"prompt": "a"}).answer()).status == 200

    run(work)


def test_jobs_that_wait_for_a_desk_are_as_many_as_are_admitted() -> None:
    async def work() -> None:
        async with local_front_end() as front_end:
            front_end.desks.works.clear()
            clients = [
                front_end.ask(path, fields)
                for path, fields in (("/tokenize", {"prompt": "a"}), (CHAT, {"messages": said("a"), "max_tokens": 1}))
                for _ in range(CAPACITY)
            ]
            await settle()
            refused = [await client.answer() for client in clients if client.is_answered]
            assert len(refused) == CAPACITY, f"the queue has no bound: {len(refused)} of {len(clients)} are refused"
            assert {answer.status for answer in refused} == {429}
            front_end.desks.works.set()
            assert sorted([(await client.answer()).status for client in clients]) == [200] * CAPACITY + [429] * CAPACITY
            assert front_end.is_at_rest, front_end.held

    run(work)


# --- shared by key ---


def test_desks_and_places_are_shared_by_key_however_many_connections_one_has() -> None:
    async def work() -> None:
        async with local_front_end(text_processes=2, api_keys=KEYS) as front_end:
            front_end.desks.works.clear()
            flood = [front_end.ask("/tokenize", {"prompt": "a"}, FIRST) for _ in range(CAPACITY)]
            await settle()
            num_held = sum(not client.is_answered for client in flood)
            assert num_held == CAPACITY // 2, f"one key's connections hold {num_held} of {CAPACITY} places"
            assert len(front_end.desks.taken) == 1, "one key's connections have all desks"
            other = front_end.ask("/tokenize", {"prompt": "b"}, SECOND)
            await settle()
            assert not other.is_answered
            bodies = [job.body for job in front_end.desks.taken if isinstance(job, ReadBody)]
            assert b"b" in bodies[-1], "one key's connections are served before another key's"
            front_end.desks.works.set()
            assert (await other.answer()).status == 200
            for client in flood:
                await client.answer()
            assert front_end.is_at_rest, front_end.held

    run(work)


# --- streams and their windows ---


def test_only_streams_have_a_window() -> None:
    async def work() -> None:
        async with local_front_end() as front_end:
            for stream, n, logprobs in ((False, 1, 0), (True, 1, 5), (True, 4, 0), (True, 6, 5)):
                body = {"prompt": "a", "n": n, "max_tokens": 1, "stream": stream, "logprobs": logprobs}
                await front_end.ask(COMPLETIONS, body).answer()
            windows = [command.max_unread for command in front_end.engine.submitted]
            plain = UnreadLimit(MAX_UNREAD_REPORTS, FIRST_UNREAD_BYTES, MAX_UNREAD_BYTES)
            # Two reports of each of 6 continuations, with six log probabilities each.
            wide = UnreadLimit(MAX_UNREAD_REPORTS, 2 * 6 * 6 * TOKEN_SCORE_BYTES, MAX_UNREAD_BYTES)
            assert windows == [None, plain, plain, wide], "whole answers pause, or streams do not"

    run(work)


def test_a_stream_that_nobody_reads_stops_at_its_window() -> None:
    async def work() -> None:
        async with local_front_end() as front_end:
            client = front_end.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 200, "stream": True})
            client.reads.clear()
            await settle()
            left = sum(map(len, front_end.engine.waiting.values()))
            assert left == 201 - MAX_UNREAD_REPORTS, f"an answer runs on unread: {left} of 201 reports are left"
            client.reads.set()
            assert (await client.answer()).is_done

    run(work)


# --- bytes of answers ---


REPORT = 258
"""Bytes that a report of one character counts."""


def test_a_stream_that_is_read_gives_its_bytes_back() -> None:
    async def work() -> None:
        limits = Limits(max_answer_bytes=(MAX_UNREAD_REPORTS + 8) * REPORT, small_bytes=0)
        async with local_front_end(limits=limits) as front_end:
            answer = await front_end.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 240, "stream": True}).answer()
            assert answer.is_done, f"bytes of a stream that is read are not given back: {answer.events[-1]}"
            assert front_end.is_at_rest, front_end.held

    run(work)


def ask_for_too_much(front_end: LocalFrontEnd, *, stream: bool) -> Client:
    """An answer that is larger than all that may wait, to a client that reads nothing."""
    client = front_end.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 100, "stream": stream}, FIRST)
    client.reads.clear()
    return client


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_for_which_there_is_no_room_ends_alone_and_leaves_nothing(stream: bool) -> None:
    async def work() -> None:
        async with local_front_end(
            limits=Limits(max_answer_bytes=24 * REPORT, small_bytes=0), api_keys=KEYS
        ) as front_end:
            client = ask_for_too_much(front_end, stream=stream)
            await settle()
            assert not front_end.engine.waiting, "the engine still works on an answer for which there is no room"
            other = await front_end.ask(COMPLETIONS, {"prompt": "b", "max_tokens": 2}, SECOND).answer()
            assert (other.status, other.value["choices"][0]["text"]) == (200, "bb")
            client.reads.set()
            answer = await client.answer()
            assert answer.status == (200 if stream else 503), f"an answer beyond the budget is sent: {answer.status}"
            error = answer.events[-1]["error"] if stream else answer.value["error"]
            assert "too much of the answers waits to be read; read faster, or ask for less" in error["message"]
            assert stream or int(answer.headers["retry-after"]) > 0
            assert not answer.is_done
            assert front_end.is_at_rest, f"an answer without room leaves {front_end.held}"
            again = await front_end.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 2}, FIRST).answer()
            assert again.status == 200

    run(work)


def test_a_written_answer_for_which_there_is_no_room_is_refused() -> None:
    async def work() -> None:
        async with local_front_end(limits=Limits(max_answer_bytes=400, small_bytes=0)) as front_end:
            for prompt, num_held, status, code in (("a" * 250, 0, 400, "answer_too_large"), ("a", 380, 503, None)):
                with front_end.service.answers.opened("") as held:
                    assert held.take(num_held)
                    answer = await front_end.ask("/tokenize", {"prompt": prompt}).answer()
                assert answer.status == status, f"an answer beyond the budget is sent: {answer.status}"
                assert "ask for less" in answer.message
                assert code in (None, answer.value["error"]["code"])
                assert front_end.is_at_rest, f"an answer without room leaves {front_end.held}"
                assert (await front_end.ask("/tokenize", {"prompt": "a"}).answer()).status == 200

    run(work)


def test_vectors_for_which_there_is_no_room_are_refused() -> None:
    async def work() -> None:
        told = local.opened(embeds=True)
        async with local_front_end(told, Limits(max_answer_bytes=2000, small_bytes=0)) as front_end:
            answer = await front_end.ask("/v1/embeddings", {"input": ["a"] * 8}).answer()
            assert (answer.status, "too much of the answers" in answer.message) == (503, True)
            assert front_end.is_at_rest, f"an answer without room leaves {front_end.held}"
            assert (await front_end.ask("/v1/embeddings", {"input": "a"}).answer()).status == 200

    run(work)


@pytest.mark.parametrize(
    ("embeds", "path", "fields", "num_left"),
    [
        (False, COMPLETIONS, {"prompt": "a", "max_tokens": 1}, 600),
        (False, COMPLETIONS, {"prompt": "a", "max_tokens": 1, "stream": True}, 600),
        (True, "/v1/embeddings", {"input": "a"}, 200),
    ],
)
def test_a_request_that_finds_no_room_for_any_report_is_refused(
    embeds: bool, path: str, fields: dict[str, object], num_left: int
) -> None:
    """There is room for what a desk reads from the body, and no more."""

    async def work() -> None:
        async with local_front_end(
            local.opened(embeds=embeds), Limits(max_answer_bytes=10_000, small_bytes=0)
        ) as front_end:
            with front_end.service.answers.opened("") as held:
                assert held.take(10_000 - num_left)
                answer = await front_end.ask(path, fields).answer()
            assert answer.status == 503, f"expected 503 where there is no room, got {answer.status}: {answer.body!r}"
            assert "too much of the answers waits to be read" in answer.message
            assert front_end.is_at_rest, f"an answer without room leaves {front_end.held}"
            assert (await front_end.ask(path, fields).answer()).status == 200

    run(work)


def test_the_bytes_of_a_whole_answer_count_until_they_are_sent() -> None:
    async def work() -> None:
        async with local_front_end() as front_end:
            client = front_end.ask("/tokenize", {"prompt": "a" * 200})
            client.reads.clear()
            await settle()
            assert front_end.held["bytes of answers"] > 200, "an answer that is not sent does not count"
            client.reads.set()
            await client.answer()
            assert front_end.is_at_rest, front_end.held

    run(work)


# --- settings that reach the desks, and what is told ---


def test_unknown_fields_are_refused_on_every_route_that_reads_a_body() -> None:
    async def work() -> None:
        for embeds in (False, True):
            async with local_front_end(local.opened(embeds=embeds)) as front_end:
                routes = [route for route in front_end.server.table.routes if route.example is not None]
                assert len(routes) >= 4
                for route in routes:
                    answer = await front_end.ask(route.path, {**(route.example or {}), "other": 1}).answer()
                    assert answer.status == 400, f"an unknown field of {route.path} is let in"
                    assert "other is not a known field" in answer.message

    run(work)


def test_the_cost_of_a_request_is_limited_on_every_route_that_uses_the_engine() -> None:
    async def work() -> None:
        for embeds in (False, True):
            told = local.opened(embeds=embeds)
            async with local_front_end(told, Limits(max_cost=3)) as front_end:
                paths: dict[str, dict[str, object]] = {
                    "/v1/chat/completions": {"messages": said("a"), "max_tokens": 9},
                    "/v1/completions": {"prompt": "a", "max_tokens": 9},
                    "/v1/embeddings": {"input": "a" * 9},
                    "/v1/score": {"text_1": "a" * 9, "text_2": "b"},
                    "/v1/rerank": {"query": "a", "documents": ["a" * 9]},
                }
                tried = [route.path for route in front_end.server.table.routes if route.path in paths]
                assert len(tried) == (3 if embeds else 2)
                for path in tried:
                    answer = await front_end.ask(path, paths[path]).answer()
                    assert answer.status == 400, f"the cost of {path} is not limited"
                    assert answer.value["error"]["code"] == "cost_exceeded"
                assert not front_end.engine.submitted

    run(work)


def test_the_memory_that_the_front_end_may_take_is_told() -> None:
    async def work() -> None:
        limits = Limits(max_held_bytes=1 << 20, max_answer_bytes=3 << 20)
        async with local_front_end(limits=limits) as front_end:
            told = (await front_end.get("/server_info")).value["limits"]
            assert told["max_front_end_bytes"] == memory_bound(limits)
            assert told["max_answer_bytes"] == 3 << 20
        assert memory_bound(Limits()) - memory_bound(limits) == 2 * (124 << 20)

    run(work)


def test_what_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "PATIENCE", 0.01)

    async def work() -> None:
        with pytest.raises(AssertionError, match="expected a sign, got nothing"):
            await within(asyncio.sleep(9), "a sign")

    run(work)
