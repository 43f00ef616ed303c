"""The front end's desks: keeps them running, and gives them jobs in turn.

    jobs of every caller ─▶ queue, fair among callers ─▶ a free desk ─▶ result

Callers take turns, and with several callers one of them never has all desks. A desk that takes too long over a job, or
ends, is replaced, and the job is answered. Does not know what the jobs are for.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sightline.server.desks.protocol import Broken, Job, Ready, Result, Setup, job_codec, result_codec
from sightline.server.logs import log
from sightline.server.process.child import Child, start_child
from sightline.server.process.frames import LENGTH_BYTES, ProtocolError

logger = logging.getLogger("sightline.server")
DESK = (sys.executable, "-P", "-m", "sightline.server.desks.worker")
START_SECONDS = 60.0
"""How long a desk may take to load the tokenizer."""
PIECE_BYTES = 1 << 16
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0
"""Seconds before the next start: doubled as long as desks end before they are ready."""


class JobTimeoutError(Exception):
    """A job took too long, and its desk was replaced."""


class DeskLostError(Exception):
    """The desk ended while it worked on the job."""


class NoDeskError(Exception):
    """There is no desk: the next one could not be started, or the pool has ended."""


class NoRoomError(Exception):
    """There is no room for the result."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes = num_bytes


@dataclass(eq=False)
class Ticket:
    """A job that waits for a desk."""

    caller: str
    make: Callable[[int], Job]
    """The job with a given number."""
    take_room: Callable[[int], bool]
    """Called with the size of the result before it is read; returns False if there is no room for it."""
    result: asyncio.Future[Result] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class FairQueue:
    """Jobs of many callers, who take turns."""

    def __init__(self, most: int) -> None:
        """`most` jobs of one caller may be out at a time."""
        self._most = most
        self._waiting: OrderedDict[str, dict[Ticket, None]] = OrderedDict()
        """By caller; the caller that had a turn longest ago comes first. Each line is in order of arrival."""
        self._out: Counter[str] = Counter()
        self._changed = asyncio.Event()

    def put(self, ticket: Ticket) -> None:
        self._waiting.setdefault(ticket.caller, {})[ticket] = None
        self._changed.set()

    def drop(self, ticket: Ticket) -> None:
        """Forgets a job that waits, if it does: it holds a body, which counts only as long as its client is there."""
        line = self._waiting.get(ticket.caller, {})
        line.pop(ticket, None)
        if not line:
            self._waiting.pop(ticket.caller, None)

    def put_back(self, ticket: Ticket) -> None:
        """Lets a job wait again that no desk began, before the others of its caller."""
        if not ticket.result.done():
            self._waiting[ticket.caller] = {ticket: None, **self._waiting.get(ticket.caller, {})}
        self.done(ticket)

    def fail_all(self, error: Exception) -> None:
        """Answers every job that waits."""
        for line in self._waiting.values():
            for ticket in line:
                _settle(ticket, error)
        self._waiting.clear()

    async def take(self) -> Ticket:
        """The next job. `done` must be called when it is over."""
        while (ticket := self._next()) is None:
            self._changed.clear()
            await self._changed.wait()
        return ticket

    def done(self, ticket: Ticket) -> None:
        self._out[ticket.caller] -= 1
        self._changed.set()

    def _next(self) -> Ticket | None:
        for caller, line in self._waiting.items():
            if self._out[caller] < self._most:
                ticket = next(iter(line))
                self.drop(ticket)
                if line:
                    self._waiting.move_to_end(caller)
                self._out[caller] += 1
                return ticket
        return None


class DeskPool:
    """A fixed number of desks."""

    def __init__(self, count: int, *, shared: bool, seconds: float, command: Sequence[str] = DESK) -> None:
        """`shared` says that there are several callers; a job may take `seconds`."""
        self._count = count
        self.seconds = seconds
        self._command = tuple(command)
        self._queue = FairQueue(max(1, count - 1) if shared else count)
        self._numbers = itertools.count(1)
        self._ready = asyncio.Event()
        self._jobs, self._results = job_codec(), result_codec()
        self.num_replaced = 0
        """Desks that were killed or ended."""
        self.pids: set[int] = set()
        self.num_ready = 0
        """Desks that take jobs."""
        self._is_over = False

    async def run(self, setup: asyncio.Future[Setup]) -> None:
        """Keeps the desks running until it is cancelled; then every job is answered.

        They start at once, and are set up when the model is known.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._count):
                    group.create_task(self._keep(setup))
        finally:
            self._is_over = True
            self._queue.fail_all(NoDeskError())

    async def until_ready(self) -> None:
        """Returns when the first desk takes jobs."""
        await self._ready.wait()

    async def work(self, caller: str, make: Callable[[int], Job], take_room: Callable[[int], bool]) -> Result:
        """Has a job done in the caller's turn. `take_room` is called with the result's size before that is read.

        Raises `JobTimeoutError`, `DeskLostError`, `NoDeskError`, or `NoRoomError` if `take_room` returned False.
        """
        if self._is_over:
            raise NoDeskError
        ticket = Ticket(caller, make, take_room)
        self._queue.put(ticket)
        try:
            return await ticket.result
        finally:
            self._queue.drop(ticket)
            ticket.result.cancel()

    async def _keep(self, setup: asyncio.Future[Setup]) -> None:
        """Runs one desk after another."""
        num_failures = 0
        while True:
            try:
                child = await start_child(self._command)
            except OSError as error:
                log(logger, logging.ERROR, "desk not started", {"error": str(error)})
                num_failures += 1
            else:
                num_failures = 0 if await self._attend(child, setup) else num_failures + 1
            self.num_replaced += 1
            if num_failures and not self.num_ready:
                self._queue.fail_all(NoDeskError())
            await asyncio.sleep(min(FIRST_PAUSE * 2.0 ** min(num_failures, 32), LONGEST_PAUSE) if num_failures else 0.0)

    async def _attend(self, child: Child, setup: asyncio.Future[Setup]) -> bool:
        """Gives jobs to a desk until it is lost. Returns whether it was ever ready."""
        pid, is_ready = child.process.pid, False
        self.pids.add(pid)
        ended = asyncio.ensure_future(child.process.wait())
        try:
            first = await asyncio.shield(setup)
            async with asyncio.timeout(START_SECONDS):
                is_ready = isinstance(await self._exchange(child, first), Ready)
            if is_ready:
                self.num_ready += 1
                self._ready.set()
            while is_ready:
                await self._do(child, await self._next_job(ended))
        except (TimeoutError, JobTimeoutError, DeskLostError, OSError, EOFError, ProtocolError) as error:
            log(logger, logging.ERROR, "desk lost", {"desk_pid": pid, "error": type(error).__name__})
        finally:
            self.num_ready -= is_ready
            self.pids.discard(pid)
            child.writer.close()
            with suppress(ProcessLookupError):
                child.process.kill()
            await ended
        return is_ready

    async def _next_job(self, ended: asyncio.Future[int]) -> Ticket:
        """The next job. Raises `DeskLostError` if the desk ends first: no job is given to one that is gone."""
        taking = asyncio.ensure_future(self._queue.take())
        either: set[asyncio.Future[Any]] = {taking, ended}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                return taking.result()
            if taking.done():
                self._queue.put_back(taking.result())
            raise DeskLostError
        finally:
            taking.cancel()

    async def _do(self, child: Child, ticket: Ticket) -> None:
        """Has one job done. Raises if the desk cannot go on."""
        number = next(self._numbers)
        try:
            async with asyncio.timeout(self.seconds):
                result = await self._exchange(child, ticket.make(number), ticket)
            if result.number != number:
                raise ProtocolError(f"expected the result of job {number}, got that of {result.number}")
        except TimeoutError as error:
            _settle(ticket, JobTimeoutError())
            raise JobTimeoutError from error
        except (OSError, EOFError, ProtocolError) as error:
            _settle(ticket, DeskLostError())
            raise DeskLostError from error
        except NoRoomError as error:
            _settle(ticket, error)
        else:
            _settle(ticket, result)
            if isinstance(result, Broken) and result.is_last:
                raise DeskLostError
        finally:
            _settle(ticket, NoDeskError())
            self._queue.done(ticket)

    async def _exchange(self, child: Child, job: Job, ticket: Ticket | None = None) -> Result:
        """Sends a job, and reads its result.

        Raises `NoRoomError`, and has read past the result, if there is no room for it or nobody waits for it.
        """
        child.writer.write(self._jobs.encode([job]))
        await child.writer.drain()
        size = left = self._results.length(await child.reader.readexactly(LENGTH_BYTES))
        if ticket is not None and (ticket.result.done() or not ticket.take_room(size)):
            while left > 0:
                left -= len(await child.reader.readexactly(min(left, PIECE_BYTES)))
            raise NoRoomError(size)
        results = self._results.decode(await child.reader.readexactly(size))
        if len(results) != 1:
            raise ProtocolError(f"expected one result, got {len(results)}")
        return results[0]


def _settle(ticket: Ticket, outcome: Result | Exception) -> None:
    """Answers a job, unless it is answered or nobody waits for it."""
    if ticket.result.done():
        return
    if isinstance(outcome, Exception):
        ticket.result.set_exception(outcome)
    else:
        ticket.result.set_result(outcome)
