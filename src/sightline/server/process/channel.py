"""The engine process's end of the socket. A thread reads, so that commands come in while a step runs."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from sightline.server.process.frames import LENGTH_BYTES, ProtocolError
from sightline.server.process.protocol import (
    MAX_REPORT_BYTES,
    Command,
    Report,
    command_codec,
    report_codec,
)

logger = logging.getLogger("sightline.engine")


class FrontEndGoneError(Exception):
    """Nobody is left to work for."""


class Channel:
    """Commands in, reports out."""

    def __init__(
        self, connection: socket.socket, when_gone: Callable[[], None], max_report_bytes: int = MAX_REPORT_BYTES
    ) -> None:
        """`when_gone` is called, on the thread that reads, when the front end is gone."""
        self._connection = connection
        self._when_gone = when_gone
        self._commands: SimpleQueue[list[Command] | None] = SimpleQueue()
        self._reports = report_codec(max_report_bytes)
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def take(self, *, wait: bool, seconds: float | None = None) -> list[Command]:
        """All commands that have come; waits for the first where asked to, at most so long."""
        taken: list[Command] = []
        while True:
            try:
                commands = self._commands.get(wait and not taken, seconds)
            except Empty:
                return taken
            if commands is None:
                raise FrontEndGoneError
            taken += commands

    def send(self, reports: Sequence[Report]) -> None:
        """Sends reports in one frame, or in several if they do not fit in one."""
        try:
            self._connection.sendall(self._reports.encode(reports))
        except ProtocolError:
            if len(reports) == 1:
                raise
            self.send(reports[: len(reports) // 2])
            self.send(reports[len(reports) // 2 :])
        except OSError as error:
            raise FrontEndGoneError from error

    def _read(self) -> None:
        codec = command_codec()
        try:
            with self._connection.makefile("rb") as stream:
                while len(header := stream.read(LENGTH_BYTES)) == LENGTH_BYTES:
                    self._commands.put(codec.decode(stream.read(codec.length(header))))
        except Exception as error:
            logger.error("the front end cannot be understood: %s", error)
        finally:
            self._commands.put(None)
            self._when_gone()
