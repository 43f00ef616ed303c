"""Keeps an engine process running: starts it, notices when it is lost or stuck, and starts the next one.

    listen on a socket of our own ─▶ start the process ─▶ it connects ─▶ Configure ─▶ Opened … ─▶ lost ─▶ wait ─▶ again

Owns the socket and the process. Does not know what requests are.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sightline.core.errors import ConfigError
from sightline.server.logs import log
from sightline.server.process.port import EnginePort, EngineStartError
from sightline.server.process.protocol import Configure, ProtocolError

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
        """`first` is what every process is told first; `command` starts one, with the socket's path after it."""
        self._first = first
        self._port = port
        self._stall_seconds = stall_seconds
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._connections: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        self._stopping = asyncio.Event()
        self._is_connected = False
        self.num_starts = 0

    @property
    def pid(self) -> int | None:
        """Of the engine process that runs."""
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Until stopped. Raises `EngineStartError` where the first engine process never gets ready."""
        async with self._listening() as path:
            num_failures = 0
            while not self._stopping.is_set():
                heard_before = self._port.heard_at
                why = await self._run_once(path)
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

    async def _run_once(self, path: Path) -> str:
        """One engine process to its end; why it ended."""
        self.num_starts += 1
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                str(path),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            return f"the engine process could not be started: {error}"
        self._process, self._is_connected = process, False
        self._connections = asyncio.Queue()
        log(logger, logging.INFO, "engine process started", {"engine_pid": process.pid, "start": self.num_starts})
        ended, said = asyncio.ensure_future(process.wait()), ""
        watch = asyncio.ensure_future(self._watch(process))
        try:
            said = await self._attend(ended)
        finally:
            watch.cancel()
            if process.returncode is None:
                process.kill()
            await ended
            self._process = None
        return said or f"the engine process ended with exit code {process.returncode}"

    async def _attend(self, ended: asyncio.Future[int]) -> str:
        """Serves the process's connection; what is wrong, where it said so."""
        connected = asyncio.ensure_future(self._connections.get())
        either: set[asyncio.Future[Any]] = {connected, ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not connected.done():
            connected.cancel()
            return ""
        reader, writer = connected.result()
        try:
            await self._port.attend(reader, writer, self._first)
        except (EngineStartError, ProtocolError) as error:
            return str(error)
        finally:
            writer.close()
        return ""

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
            if now - max(busy_since, self._port.heard_at) > self._stall_seconds:
                log(logger, logging.ERROR, "engine process stuck", {"seconds": self._stall_seconds})
                process.kill()
                return

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[Path]:
        """A socket that only this user can reach; it is gone afterwards."""
        folder = Path(tempfile.mkdtemp(prefix="sightline-"))
        path = folder / "engine.sock"
        server = None
        try:
            listener = _bound(path)
            server = await asyncio.start_unix_server(self._connect, sock=listener)
            log(logger, logging.DEBUG, "engine socket", {"path": str(path)})
            yield path
        finally:
            if server is not None:
                server.close()
            shutil.rmtree(folder, ignore_errors=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Only the process that was started, and only once, is listened to."""
        if self._process is None or not _is_from(writer, self._process.pid) or self._is_connected:
            log(logger, logging.ERROR, "refused a connection to the engine's socket", {})
            writer.close()
            return
        self._is_connected = True
        self._connections.put_nowait((reader, writer))


def _bound(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"expected a folder for temporary files in which a socket can be made, got {path}: {error}; set TMPDIR"
        ) from error
    finally:
        os.umask(before)
    return listener


def _is_from(writer: asyncio.StreamWriter, pid: int) -> bool:
    """Where the system tells who is at the other end, it must be the process that was started."""
    if sys.platform != "linux":
        return True
    credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    peer_pid, peer_uid, _ = struct.unpack("3i", credentials)
    return bool(peer_pid == pid and peer_uid == os.getuid())
