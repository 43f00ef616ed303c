"""The state that all handlers share: the desks, the engine's port, admission, and the model's names."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec

from sightline.core.ledger import Ledger
from sightline.core.request import Terms
from sightline.server.api.fields import UNSUPPORTED_FIELD
from sightline.server.desks.pool import DeskLostError, DeskPool, JobTimeoutError, NoDeskError, NoRoomError
from sightline.server.desks.protocol import (
    Broken,
    Declined,
    EmbeddedTexts,
    FormName,
    Generated,
    Head,
    Job,
    Order,
    ReadBody,
    Recall,
    Result,
    WriteAnswer,
    WrittenAnswer,
)
from sightline.server.http.admission import AdmissionGate
from sightline.server.http.errors import ApiError, busy, field_named_in, invalid, unavailable
from sightline.server.http.limits import COST_IN_CONTEXTS, ByteBudget, Limits, shown_fields
from sightline.server.http.routing import Call, Header, Reply
from sightline.server.logs import log
from sightline.server.process.port import Answers, AnswerTooLargeError, EngineDownError, EnginePort, RefusedError
from sightline.server.process.protocol import TOKEN_SCORE_BYTES, Opened
from sightline.server.process.window import unread_limit
from sightline.server.store import ResponseStore, StoredResponse

logger = logging.getLogger("sightline.server")
RESTART_SECONDS = 2
"""`Retry-After` while the engine process starts."""
DRAIN_SECONDS = 5
"""`Retry-After` while the server shuts down: another one may have taken its place by then."""


@dataclass(frozen=True)
class Running:
    """The accepted requests of one client's call."""

    answers: Answers
    sampling: bytes
    """The effective sampling parameters of the first prompt, as JSON."""
    num_prompt_tokens: int
    release: ExitStack
    """Cancels the requests and gives their places back."""


@dataclass
class Service:
    """One served model, from the start of the server: it refuses requests until the model is loaded."""

    port: EnginePort
    desks: DeskPool
    loaded: Future[AdmissionGate]
    """Resolved when the first engine process has loaded the model, and a desk can read bodies."""
    answers: ByteBudget
    """Bytes that desks and the engine process have sent for requests that are not answered."""
    limits: Limits
    served_names: tuple[str, ...]
    """The names that clients may use; empty: the name that the engine process gives."""
    request_timeout: float | None
    """Seconds that a request may run."""
    ledger: Ledger
    """The front end's ledger; the engine's entries are in `opened`."""
    store: ResponseStore = field(default_factory=lambda: ResponseStore(0, 0))
    memory_bound: int = 0
    """Most bytes of memory that the front end may take."""
    created: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    """Whether the server is shutting down: nothing more is admitted."""

    @property
    def opened(self) -> Opened:
        """The report of the latest engine process. Raises `ApiError` before there is one."""
        if self.port.opened is None:
            raise _loading()
        return self.port.opened

    @property
    def admission(self) -> AdmissionGate:
        """Raises `ApiError` while the model loads or the server shuts down."""
        if self.is_draining:
            raise unavailable("the server is shutting down; use another one", DRAIN_SECONDS)
        if not self.loaded.done():
            raise _loading()
        return self.loaded.result()

    @property
    def num_under_way(self) -> int:
        """Sequences that were admitted and have not ended."""
        return self.loaded.result().num_held if self.loaded.done() else 0

    @property
    def is_reading(self) -> bool:
        """Whether the model is loaded, and a desk can read bodies."""
        return self.loaded.done() and self.desks.num_ready > 0

    def check_room(self, caller: str) -> None:
        """Raises `ApiError` if nothing more of this caller can be admitted at present."""
        self.admission.check_room(caller)

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_names or (self.opened.model,)

    @property
    def metrics_name(self) -> str:
        """The model's name in metrics; empty until it is known."""
        if self.port.opened is None and not self.served_names:
            return ""
        return self.names[0]

    @property
    def max_cost(self) -> int:
        return self.limits.max_cost or COST_IN_CONTEXTS * self.opened.max_model_len

    async def order(self, call: Call, form: FormName, held: ExitStack) -> Order:
        """Has the body read at a desk. `held` takes the places of all sequences. Raises `ApiError`."""
        places = held.enter_context(self.admission.admitted(call.caller))
        match await self._read(call, form):
            case Order() as order:
                places.grow(len(order.prompts) * order.n)
                return order
            case result:
                raise self._broken(call, f"expected an order, got {type(result).__name__}", ())

    async def answer_at_desk(self, call: Call, form: FormName) -> Reply:
        """Has a body answered at a desk, without the engine. Raises `ApiError`."""
        with self.admission.admitted(call.caller):
            match await self._read(call, form):
                case WrittenAnswer(body=body):
                    return Reply(body)
                case result:
                    raise self._broken(call, f"expected an answer, got {type(result).__name__}", ())

    async def write(
        self,
        call: Call,
        form: FormName,
        ticket: bytes,
        head: Head,
        outcome: Generated | EmbeddedTexts,
        headers: tuple[Header, ...],
    ) -> Reply:
        """Has the answer to an order written at a desk. Raises `ApiError`."""
        packed = msgspec.msgpack.encode(outcome)
        match await self._work(call, lambda number: WriteAnswer(number, form, ticket, head, packed)):
            case WrittenAnswer(body=body, kept=kept):
                if kept is not None:
                    self.store.keep(call.caller, head.id, StoredResponse(body, kept))
                return Reply(body, headers=headers)
            case result:
                raise self._broken(call, f"expected an answer, got {type(result).__name__}", ())

    def submit(self, call: Call, order: Order, held: ExitStack) -> Answers:
        """Sends an order to the engine process; `held` cancels it. Raises `EngineDownError`."""
        unread = held.enter_context(self.answers.opened(call.caller))
        # Texts to embed have no deadline in the engine: their handler waits only so long.
        timeout = None if order.params is None else self.request_timeout
        terms = Terms(caller=call.caller, priority=order.priority, timeout=timeout)
        limit = None if order.stream is None else unread_limit(order.n, TOKEN_SCORE_BYTES * order.stream.num_scored)
        answers = self.port.submit(order.prompts, order.params, terms, call.received_at, unread, limit)
        held.callback(self.port.cancel, answers)
        call.trace.model, call.trace.times = order.model, answers.times
        call.facts["prompt_tokens"] = sum(answers.prompt_lens.values())
        return answers

    async def start(self, call: Call, order: Order, release: ExitStack) -> Running:
        """Submits an order and waits until all of it is accepted. `release` already holds its places."""
        with release:
            try:
                answers = self.submit(call, order, release)
                sampling = await answers.accepted()
                call.trace.sampling = sampling[0]
            except (EngineDownError, AnswerTooLargeError) as error:
                raise unavailable(str(error), RESTART_SECONDS) from error
            except RefusedError as error:
                raise self.refusal(error, len(order.prompts) * order.n, field_named_in(str(error))) from error
            return Running(answers, sampling[0], sum(answers.prompt_lens.values()), release.pop_all())

    def refusal(self, error: RefusedError, count: int, param: str | None) -> ApiError:
        """The answer to a request of `count` sequences that the engine refused."""
        return busy(str(error), self.admission.retry_after(count)) if error.is_full else invalid(str(error), param)

    async def _read(self, call: Call, form: FormName) -> Order | WrittenAnswer:
        result = await self._work(call, lambda number: ReadBody(number, form, call.body))
        if isinstance(result, Recall):
            recalled = self._recalled(call, result.responses)
            result = await self._work(call, lambda number: ReadBody(number, form, call.body, recalled))
        match result:
            case Order() | WrittenAnswer():
                if result.unused:
                    call.headers.append((b"x-sightline-unused", shown_fields(result.unused).encode()))
                    call.facts["unused"] = shown_fields(result.unused)
                return result
            case result:
                raise self._broken(call, f"expected what a body says, got {type(result).__name__}", ())

    def _recalled(self, call: Call, names: Sequence[str]) -> dict[str, StoredResponse]:
        """The stored responses that a body refers to, as far as there are any. Raises `ApiError` for too many bytes."""
        found = {name: self.store.find(call.caller, name) for name in names}
        recalled = {name: each for name, each in found.items() if each is not None}
        num_bytes, most = sum(each.num_bytes for each in recalled.values()), self.limits.max_body_bytes
        if num_bytes > most:
            raise invalid(
                f"expected references to stored responses of at most {most:,} bytes together, got {num_bytes:,}; refer "
                "to fewer"
            )
        return recalled

    async def _work(self, call: Call, make: Callable[[int], Job]) -> Result:
        """Has a job done at a desk. The result's bytes count until the request is answered. Raises `ApiError`."""
        held = call.held.enter_context(self.answers.opened(call.caller))
        try:
            result = await self.desks.work(call.caller, make, held.take)
        except JobTimeoutError as error:
            raise invalid(
                f"expected a request whose texts are processed within {self.desks.seconds:g} s, got one that takes "
                "longer; shorten it",
                code="text_timeout",
            ) from error
        except DeskLostError as error:
            raise self._broken(call, "the text process ended", ()) from error
        except NoDeskError as error:
            raise unavailable("no text process runs at the moment; try again soon", RESTART_SECONDS) from error
        except NoRoomError as error:
            if error.num_bytes > self.answers.most:
                message = f"expected an answer of at most {self.answers.most:,} bytes, got {error.num_bytes:,}"
                raise invalid(
                    f"{message}; ask for less, or raise --max-answer-bytes", code="answer_too_large"
                ) from error
            raise unavailable(
                "there is no room for the answer at present; try again, or ask for less", RESTART_SECONDS
            ) from error
        match result:
            case Declined(status=status, message=message, kind=kind, param=param, code=code):
                if code == UNSUPPORTED_FIELD:
                    # A name from the table of fields. That of an unknown one may be anything, and is not logged.
                    call.facts["unsupported"] = param
                call.facts["error"] = code
                raise ApiError(status, message, kind=kind, param=param, code=code)
            case Broken(error=name, where=where):
                raise self._broken(call, name, where)
            case _:
                return result

    def _broken(self, call: Call, error: str, where: Sequence[str]) -> ApiError:
        """Logs a failure that is not the client's."""
        log(logger, logging.ERROR, "desk failed", {"id": call.request_id, "error": error, "where": list(where)})
        return ApiError(500, f"internal error; see the log for request {call.request_id}", kind="server_error")


def _loading() -> ApiError:
    return unavailable("the model is still loading; try again soon", RESTART_SECONDS)
