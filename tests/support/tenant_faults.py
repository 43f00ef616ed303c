"""Faults of the front end by which one caller harms another, for its tests to find."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from sightline.server.desks import pool
from sightline.server.desks.forms import embeddings
from sightline.server.desks.forms.chat import ChatForm
from sightline.server.desks.forms.form import ServedModel
from sightline.server.desks.pool import DeskPool, FairQueue, Ticket
from sightline.server.desks.protocol import FormName, Job, Result, Setup, WrittenAnswer
from sightline.server.desks.text import TextDesk
from sightline.server.http.access import Keyring
from sightline.server.http.admission import AdmissionGate, Places
from sightline.server.http.errors import ApiError
from sightline.server.http.limits import ByteBudget, HeldBytes
from sightline.server.http.room import Room
from sightline.server.http.routing import Call, Reply
from sightline.server.process.child import Child
from sightline.server.process.port import Answers, EnginePort, RequestReport
from sightline.server.process.protocol import Delta
from sightline.server.process.window import ReadWindow, UnreadLimit
from sightline.server.service import Service
from support.commands import UNBOUNDED

# --- lengths and costs ---


def skip_the_length_of_texts_that_are_cut(patch: pytest.MonkeyPatch) -> None:
    """`truncate_prompt_tokens` lets a text of any length in."""
    encode_cut = TextDesk.encode_cut

    def trusting(desk: TextDesk, text: str, most: int | None, param: str) -> list[int]:
        if most is None:
            return encode_cut(desk, text, most, param)
        return desk._tokenizer.encode_prompt(text)[:most]

    patch.setattr(TextDesk, "encode_cut", trusting)


def skip_the_length_of_texts_without_special_tokens(patch: pytest.MonkeyPatch) -> None:
    encode = TextDesk.encode

    def trusting(desk: TextDesk, text: str, param: str = "prompt", *, add_special_tokens: bool = True) -> list[int]:
        return encode(desk, text, param) if add_special_tokens else desk._tokenizer.encode_text(text)

    patch.setattr(TextDesk, "encode", trusting)


def skip_the_length_of_conversations(patch: pytest.MonkeyPatch) -> None:
    check = TextDesk._check_length

    def trusting(desk: TextDesk, num_characters: int, param: str) -> None:
        if param != "messages":
            check(desk, num_characters, param)

    patch.setattr(TextDesk, "_check_length", trusting)


def skip_the_cost_of_conversations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ChatForm, "_check_cost", lambda *_: None)


def skip_the_cost_of_texts_to_embed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(embeddings, "check_cost", lambda **_: None)


def allow_unknown_fields_at_the_desk(patch: pytest.MonkeyPatch) -> None:
    setup_model = ServedModel.__init__

    def lenient(model: ServedModel, setup: Setup) -> None:
        setup_model(model, msgspec.structs.replace(setup, allows_unknown=True))

    patch.setattr(ServedModel, "__init__", lenient)


# --- queues without a bound ---


def queue_jobs_without_a_place(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def admitted(gate: AdmissionGate, caller: str, count: int = 1) -> Iterator[Places]:
        yield Places(Room(10**6, shared=False), caller, gate.retry_after)

    patch.setattr(AdmissionGate, "admitted", admitted)


def give_streams_no_window(patch: pytest.MonkeyPatch) -> None:
    """The engine process is not told when to pause."""
    submit = EnginePort.submit

    def boundless(port: EnginePort, *asked: Any) -> Answers:
        prompts, params, terms, received_at, unread, _ = asked
        return submit(port, prompts, params, terms, received_at, unread, None)

    patch.setattr(EnginePort, "submit", boundless)


def forget_unread_reports_on_resume(patch: pytest.MonkeyPatch) -> None:
    read = ReadWindow.read

    def forgetful(window: ReadWindow, count: int, num_bytes: int) -> bool:
        resumes = read(window, count, num_bytes)
        if resumes:
            window._num_unread = 0
        return resumes

    patch.setattr(ReadWindow, "read", forgetful)


def let_a_window_hold_reports_of_any_size(patch: pytest.MonkeyPatch) -> None:
    sent = ReadWindow.sent
    patch.setattr(ReadWindow, "sent", lambda window, num_bytes: sent(window, 0))


def let_a_window_grow_at_once(patch: pytest.MonkeyPatch) -> None:
    """What the socket's buffers take in is taken for reading."""
    patch.setattr(UnreadLimit, "num_bytes", lambda limit, num_read: limit.max_bytes)


def acknowledge_reports_before_they_are_sent(patch: pytest.MonkeyPatch) -> None:
    """A report counts as read as soon as it is taken from the queue."""
    take, count = Answers._next, Answers._count_read

    async def hasty(answers: Answers) -> RequestReport:
        report = await take(answers)
        if isinstance(report, Delta):
            count(answers, report)
        return report

    patch.setattr(Answers, "_next", hasty)
    patch.setattr(Answers, "_count_read", lambda *_: None)


def send_answers_without_counting_them(patch: pytest.MonkeyPatch) -> None:
    work = DeskPool.work

    async def uncounted(desks: DeskPool, caller: str, make: Callable[[int], Job], take_room: object) -> Result:
        return await work(desks, caller, make, lambda _: True)

    patch.setattr(DeskPool, "work", uncounted)


def count_no_reports(patch: pytest.MonkeyPatch) -> None:
    """Reports that wait to be read take no room."""
    put = Answers.put

    def uncounted(answers: Answers, report: RequestReport) -> bool:
        answers._unread = UNBOUNDED
        return put(answers, report)

    patch.setattr(Answers, "put", uncounted)


# --- fairness ---


def take_turns_by_connection(patch: pytest.MonkeyPatch) -> None:
    """Every job waits in a line of its own."""
    numbers = itertools.count()

    def put(queue: FairQueue, ticket: Ticket) -> None:
        queue._waiting[f"{ticket.caller} {next(numbers)}"] = {ticket: None}
        queue._changed.set()

    def drop(queue: FairQueue, ticket: Ticket) -> None:
        for caller in [caller for caller, line in queue._waiting.items() if ticket in line]:
            queue._waiting.pop(caller).clear()

    patch.setattr(FairQueue, "put", put)
    patch.setattr(FairQueue, "drop", drop)


def give_desks_by_connection(patch: pytest.MonkeyPatch) -> None:
    work, numbers = DeskPool.work, itertools.count()

    async def alone(desks: DeskPool, caller: str, *job: Any) -> Result:
        return await work(desks, f"{caller} {next(numbers)}", *job)

    patch.setattr(DeskPool, "work", alone)


def give_places_by_connection(patch: pytest.MonkeyPatch) -> None:
    """Every request comes from a caller of its own."""
    caller, numbers = Keyring.caller, itertools.count()

    def alone(keys: Keyring, authorization: bytes | None, api_key: bytes | None = None) -> str:
        return f"{caller(keys, authorization, api_key)} {next(numbers)}"

    patch.setattr(Keyring, "caller", alone)


def let_one_caller_fill_the_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Room, "left_for", lambda room, caller: room._capacity - room.num_held)


def keep_the_turn_of_a_client_that_left(patch: pytest.MonkeyPatch) -> None:
    """Its job counts as being at a desk for ever."""
    drop, take_next = FairQueue.drop, FairQueue._next

    def counting(queue: FairQueue, ticket: Ticket) -> None:
        queue._out[ticket.caller] += ticket in queue._waiting.get(ticket.caller, {})
        drop(queue, ticket)

    def taking(queue: FairQueue) -> Ticket | None:
        ticket = take_next(queue)
        if ticket is not None:
            # Counted by `drop` and once more by `_next`.
            queue._out[ticket.caller] -= 1
        return ticket

    patch.setattr(FairQueue, "drop", counting)
    patch.setattr(FairQueue, "_next", taking)


def keep_the_turn_of_a_lost_desk(patch: pytest.MonkeyPatch) -> None:
    """The caller whose job killed a desk is taken to have one still."""
    done = FairQueue.done

    def forgetful(queue: FairQueue, ticket: Ticket) -> None:
        if ticket.result.cancelled() or ticket.result.exception() is None:
            done(queue, ticket)

    patch.setattr(FairQueue, "done", forgetful)


# --- whose answer it is ---


def _exchanged(patch: pytest.MonkeyPatch, change: Callable[[Job, WrittenAnswer], Result]) -> None:
    exchange = DeskPool._exchange

    async def changed(desks: DeskPool, child: Child, job: Job, ticket: Ticket | None = None) -> Result:
        result = await exchange(desks, child, job, ticket)
        return change(job, result) if isinstance(result, WrittenAnswer) else result

    patch.setattr(DeskPool, "_exchange", changed)


def give_a_result_to_the_next_job(patch: pytest.MonkeyPatch) -> None:
    kept: list[WrittenAnswer] = []

    def swap(job: Job, result: WrittenAnswer) -> Result:
        kept.append(result)
        return msgspec.structs.replace(kept[-2:][0], number=result.number)

    _exchanged(patch, swap)


def believe_any_number_of_a_result(patch: pytest.MonkeyPatch) -> None:
    def believing(job: Job, result: WrittenAnswer) -> Result:
        assert not isinstance(job, Setup)
        return msgspec.structs.replace(result, number=job.number)

    _exchanged(patch, believing)


def swap_the_tickets_of_two_requests(patch: pytest.MonkeyPatch) -> None:
    write, tickets = Service.write, list[bytes]()

    async def swapped(service: Service, call: Call, form: FormName, ticket: bytes, *rest: Any) -> Reply:
        tickets.append(ticket)
        return await write(service, call, form, tickets[-2:][0], *rest)

    patch.setattr(Service, "write", swapped)


def give_reports_to_the_request_before(patch: pytest.MonkeyPatch) -> None:
    """A report goes to whoever asked before, if that one still waits."""
    pass_on = EnginePort._pass_on

    def astray(port: EnginePort, report: RequestReport, answers: Answers | None, now: float) -> None:
        before = port._answers.get(report.number - 1)
        if isinstance(report, Delta) and before is not None:
            report, answers = msgspec.structs.replace(report, number=report.number - 1), before
        pass_on(port, report, answers, now)

    patch.setattr(EnginePort, "_pass_on", astray)


def name_tokens_by_another_tokenizer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TextDesk, "token_text", lambda desk, token: desk._tokenizer.token_text(token + 1))


# --- requests without an answer ---


def leave_the_job_of_a_killed_desk_unanswered(patch: pytest.MonkeyPatch) -> None:
    settle = pool._settle

    def silent(ticket: Ticket, outcome: Result | Exception) -> None:
        if not isinstance(outcome, Exception):
            settle(ticket, outcome)

    patch.setattr(pool, "_settle", silent)


def leave_the_requests_of_a_lost_engine_unanswered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EnginePort, "give_up", lambda port, why: None)


# --- what is never given back ---


def keep_the_places_of_refused_bodies(patch: pytest.MonkeyPatch) -> None:
    """Nothing is given back where a request is refused."""
    give_back = Room.give_back

    def forgetful(room: Room, caller: str, count: int) -> None:
        if not isinstance(sys.exception(), ApiError):
            give_back(room, caller, count)

    patch.setattr(Room, "give_back", forgetful)


def keep_the_bytes_that_a_stream_has_sent(patch: pytest.MonkeyPatch) -> None:
    count = Answers._count_read

    def keeping(answers: Answers, delta: Delta) -> None:
        unread, answers._unread = answers._unread, UNBOUNDED
        count(answers, delta)
        answers._unread = unread

    patch.setattr(Answers, "_count_read", keeping)


def keep_the_bytes_of_an_answer_without_room(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def opened(budget: ByteBudget, caller: str) -> Iterator[HeldBytes]:
        yield HeldBytes(budget._room, caller, 0)

    patch.setattr(ByteBudget, "opened", opened)


def go_on_with_an_answer_without_room(patch: pytest.MonkeyPatch) -> None:
    """The engine is not told that nobody wants the rest."""
    put = Answers.put

    def accepting(answers: Answers, report: RequestReport) -> bool:
        put(answers, report)
        return True

    patch.setattr(Answers, "put", accepting)


def go_on_for_a_client_that_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EnginePort, "cancel", lambda port, answers: None)
