"""Keeps an engine process running: starts it, notices when it is lost or stuck, and starts the next one.

    start the process ─▶ Configure ─▶ Opened … ─▶ lost ─▶ wait ─▶ again

Owns the process and the connection to it. Does not know what requests are.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Sequence

from sightline.server.logs import log
from sightline.server.process.child import start_child
from sightline.server.process.frames import ProtocolError
from sightline.server.process.port import EnginePort, EngineStartError
from sightline.server.process.protocol import Configure

logger = logging.getLogger("sightline.server")
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 15.0
"""Seconds before the next start: doubled as long as engine processes end before a single step."""
WATCH_SECONDS = 1.0
WORKER = (sys.executable, "-P", "-m", "sightline.server.process.worker")


class Supervisor:
    """One engine process after another."""

    def __init__(
        self,
        first: Configure,
        port: EnginePort,
        *,
        stall_seconds: float,
        command: Sequence[str] = WORKER,
    ) -> None:
        """`first` is what every process is told first; `command` starts one, see `start_child`."""
        self._first = first
        self._port = port
        self._stall_seconds = stall_seconds
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self.num_starts = 0

    @property
    def pid(self) -> int | None:
        """Process id of the running engine process."""
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Runs until stopped. Raises `EngineStartError` if the first engine process never gets ready."""
        num_failures = 0
        while not self._stopping.is_set():
            heard_before = self._port.heard_at
            why = await self._run_once()
            if self._stopping.is_set():
                return
            if self._port.opened is None:
                raise EngineStartError(why)
            num_failures = 0 if self._port.heard_at > heard_before else num_failures + 1
            pause = min(FIRST_PAUSE * 2.0 ** min(num_failures, 32), LONGEST_PAUSE)
            log(logger, logging.ERROR, "engine process lost", {"why": why, "next_start_in": pause})
            await asyncio.sleep(pause)

    async def stop(self, seconds: float) -> None:
        """Ends the process: told first, then killed. One that still loads hears nothing."""
        self._stopping.set()
        process = self._process
        if process is None:
            return
        try:
            async with asyncio.timeout(seconds if self._port.is_open else 0.0):
                self._port.stop()
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _run_once(self) -> str:
        """Runs one engine process to its end. Returns why it ended."""
        self.num_starts += 1
        try:
            child = await start_child(self._command)
        except OSError as error:
            return f"the engine process could not be started: {error}"
        process = self._process = child.process
        log(logger, logging.INFO, "engine process started", {"engine_pid": process.pid, "start": self.num_starts})
        said = ""
        watch = asyncio.ensure_future(self._watch(process))
        try:
            await self._port.attend(child.reader, child.writer, self._first)
        except (EngineStartError, ProtocolError) as error:
            said = str(error)
        finally:
            watch.cancel()
            child.writer.close()
            if process.returncode is None:
                process.kill()
            await process.wait()
            self._process = None
        return said or f"the engine process ended with exit code {process.returncode}"

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kills a process that has requests and finishes no step for too long."""
        busy_since: float | None = None
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            if self._port.num_under_way == 0:
                busy_since = None
                continue
            busy_since = now if busy_since is None else busy_since
            patience = self._stall_seconds / 2
            # Where all requests are paused, a step is made only if it is asked for.
            if now - max(busy_since, self._port.heard_at) > patience and not await self._port.probe(patience):
                log(logger, logging.ERROR, "engine process stuck", {"seconds": self._stall_seconds})
                process.kill()
                return
