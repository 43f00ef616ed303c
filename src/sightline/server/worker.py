"""The engine process: reads commands, steps the engine, reports what came of it.

    loop:  commands that came ─▶ engine ─▶ one step ─▶ what every request gained, in one frame

Owns the engine and the way to the front end. Does not know HTTP. Ends when told to, when the front end is gone, and
when the device has failed; whoever started it decides what then.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue

from sightline.core.errors import QueueFullError, RequestError, SightlineError
from sightline.core.request import SamplingParams, Terms
from sightline.engine import Engine
from sightline.llm import build_engine
from sightline.models.loading.default_model import default_model_path
from sightline.server.logs import log_as_json
from sightline.server.protocol import (
    LENGTH_BYTES,
    MAX_REPORT_BYTES,
    Accepted,
    Cancel,
    Command,
    Configure,
    Delta,
    Ended,
    Failed,
    Opened,
    Probe,
    Progress,
    ProtocolError,
    Refused,
    Report,
    Stop,
    Submit,
    command_codec,
    report_codec,
)
from sightline.tools.startup import startup_report

logger = logging.getLogger("sightline.engine")
ORPHAN_SECONDS = 10.0
"""What a step has to end in, once the front end is gone."""
PROGRESS_SECONDS = 0.25
"""Between two reports of the engine's state while it works."""


class FrontEndGoneError(Exception):
    """Nobody is left to work for."""


class Channel:
    """The engine process's end of the socket. A thread reads, so that commands come in while a step runs."""

    def __init__(
        self, connection: socket.socket, when_gone: Callable[[], None], max_report_bytes: int = MAX_REPORT_BYTES
    ) -> None:
        """`when_gone` is called, on the thread that reads, when the front end is gone."""
        self._connection = connection
        self._when_gone = when_gone
        self._commands: SimpleQueue[list[Command] | None] = SimpleQueue()
        self._reports = report_codec(max_report_bytes)
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def take(self, *, wait: bool) -> list[Command]:
        """All commands that have come; waits for the first where asked to."""
        taken: list[Command] = []
        while True:
            try:
                commands = self._commands.get(block=wait and not taken)
            except Empty:
                return taken
            if commands is None:
                raise FrontEndGoneError
            taken += commands

    def send(self, reports: Sequence[Report]) -> None:
        """In one frame, or in several where they are too much for one."""
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


class Worker:
    """Moves commands into the engine, and what it produces out of it."""

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._jobs: dict[int, str] = {}
        """By the front end's number, the engine's id."""
        self._probe: str | None = None
        self._outgoing: list[Report] = []
        self._is_stopping = False
        self._told_at = -PROGRESS_SECONDS

    def run(self) -> None:
        """Until told to stop."""
        while not self._is_stopping:
            had_work = self._engine.has_work
            for command in self._channel.take(wait=not had_work):
                self._obey(command)
            if self._engine.has_work:
                self._engine.step()
                self._collect()
                self._tell_progress()
            elif had_work:
                # The last was cancelled: no step will tell that what it held is free.
                self._outgoing.append(Progress(self._engine.metrics()))
            if self._outgoing:
                self._channel.send(self._outgoing)
                self._outgoing = []
            if self._engine.fault is not None:
                raise self._engine.fault

    def _obey(self, command: Command) -> None:
        match command:
            case Submit(prompts, params, terms):
                for number, prompt in prompts.items():
                    self._submit(number, prompt, params, terms)
            case Cancel(number):
                request_id = self._jobs.pop(number, None)
                if request_id is not None:
                    self._engine.forget(request_id)
            case Probe():
                if not self._engine.has_work and self._probe is None:
                    self._probe = self._engine.submit([0], SamplingParams(max_tokens=1, ignore_eos=True))
            case Stop():
                self._is_stopping = True
            case Configure():
                raise RequestError("expected one Configure, got another")

    def _submit(self, number: int, prompt: Sequence[int], params: SamplingParams, terms: Terms) -> None:
        try:
            request_id = self._engine.submit(prompt, params, None, terms)
        except QueueFullError as error:
            self._outgoing.append(Refused(number, is_full=True, message=str(error)))
            return
        except SightlineError as error:
            self._outgoing.append(Refused(number, is_full=False, message=str(error)))
            return
        self._jobs[number] = request_id
        self._outgoing.append(Accepted(number, self._engine.params(request_id)))

    def _collect(self) -> None:
        """What every request gained in the step."""
        for number, request_id in tuple(self._jobs.items()):
            while (delta := self._engine.take_delta(request_id)) is not None:
                self._outgoing.append(
                    Delta(
                        number,
                        delta.index,
                        delta.text,
                        len(delta.token_ids),
                        delta.finish_reason,
                        delta.stop_reason,
                        delta.logprobs,
                    )
                )
            if self._engine.is_finished(request_id):
                output = self._engine.pop_output(request_id)
                self._outgoing.append(
                    Ended(number, output.error, output.num_cached_tokens, output.queue_seconds, output.prompt_logprobs)
                )
                del self._jobs[number]
        if self._probe is not None and self._engine.is_finished(self._probe):
            self._engine.forget(self._probe)
            self._probe, self._told_at = None, -PROGRESS_SECONDS

    def _tell_progress(self) -> None:
        """Now and then, and always before there is nothing left to do."""
        now = time.monotonic()
        if not self._engine.has_work or now - self._told_at >= PROGRESS_SECONDS:
            self._outgoing.append(Progress(self._engine.metrics()))
            self._told_at = now


def model_name(model: str | None) -> str:
    """What a model is called: a Hugging Face id as it is, a path by its last part."""
    if model is None:
        return default_model_path().stem
    path = Path(model)
    if not path.exists():
        return model
    return path.resolve().name.removesuffix(".gguf")


def describe(engine: Engine, name: str) -> Opened:
    """What the front end needs to know of an engine."""
    if engine.tokenizer is None:
        raise RequestError("expected an engine with a tokenizer, got one without; leave skip_tokenizer_init out")
    config = engine.runtime.config
    shown = asdict(config) | {
        "device": config.device.name,
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": config.quantization.value,
        "cache_tokens": config.cache_tokens,
    }
    return Opened(
        model=name,
        tokenizer=engine.tokenizer.to_data(),
        vocab_size=engine.vocab_size,
        max_model_len=config.max_model_len,
        max_rows=config.max_rows,
        max_queued=config.max_queued,
        config=shown,
        lines=tuple(startup_report(engine)),
        degradations=tuple(str(entry) for entry in engine.ledger),
    )


def _end_soon() -> None:
    """A step that never ends keeps nobody waiting: there is nobody left."""
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)


def serve_engine(path: str) -> int:
    """Connects to the front end at `path`, builds what it asks for, and works until told to stop."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    channel = Channel(connection, _end_soon)
    try:
        match channel.take(wait=True):
            case [Configure(config, log_level)]:
                log_as_json(log_level)
            case _:
                logger.error("expected Configure first, got something else")
                return 1
        try:
            engine = build_engine(config)
        except SightlineError as error:
            channel.send([Failed(str(error))])
            return 1
        channel.send([describe(engine, model_name(config.model))])
        Worker(engine, channel).run()
    except FrontEndGoneError:
        logger.warning("the front end is gone; the engine process ends")
    return 0


def main() -> None:
    """The entry point: `python -m sightline.server.worker SOCKET`."""
    # A terminal's Ctrl-C reaches every process; the front end decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log_as_json()
    try:
        sys.exit(serve_engine(sys.argv[1]))
    except Exception as error:
        logger.critical("the engine process ends: %s", error, exc_info=error)
        sys.exit(1)


if __name__ == "__main__":
    main()
