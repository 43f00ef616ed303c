"""The other end of an engine process's socket, with its loop on a thread of the test."""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Thread

from sightline import LLM
from sightline.server.process.channel import Channel
from sightline.server.process.frames import LENGTH_BYTES
from sightline.server.process.loop import GeneratingPurpose, Worker
from sightline.server.process.protocol import Command, Report, Stop, command_codec, report_codec


class FrontEnd:
    """The other end of a worker's socket, and the worker on a thread."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._socket, self._other = socket.socketpair()
        self._socket.settimeout(20)
        self._worker = Worker(GeneratingPurpose(llm.engine), Channel(self._other, lambda: None))
        self.raised: list[BaseException] = []
        self._thread = Thread(target=self._run)
        self._thread.start()

    def send(self, *commands: Command) -> None:
        self._socket.sendall(command_codec().encode(commands))

    def receive(self) -> list[Report]:
        codec = report_codec()
        header = self._socket.recv(LENGTH_BYTES, socket.MSG_WAITALL)
        return codec.decode(self._socket.recv(codec.length(header), socket.MSG_WAITALL))

    def until(self, kind: type[Report], number: int = 1) -> list[Report]:
        """Everything up to so many reports of a kind."""
        reports: list[Report] = []
        while sum(isinstance(report, kind) for report in reports) < number:
            reports += self.receive()
        return reports

    def end(self) -> None:
        with suppress(OSError):
            self.send(Stop())
        self.close()

    def close(self) -> None:
        self._socket.close()
        self._thread.join(20)
        self._other.close()
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._worker.run()
        except BaseException as error:
            self.raised.append(error)
