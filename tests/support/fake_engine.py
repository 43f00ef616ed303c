"""An engine process without an engine: it speaks the protocol, counts instead of computing, and fails when asked to.

`python fake_engine.py DESCRIPTOR`. A request's answer is "0 1 2 …", a number a step. `EngineConfig.model` says how it
behaves, as `key=value` with commas between: `delay` (seconds a step), `opening` (seconds until it is open), `fail`
(says that it cannot start), `silent` (ends without a word). A request with the seed 666 ends the process; with 667 the
process hangs; with 668 the request fails.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from dataclasses import dataclass

import msgspec
import tokenizers

from sightline.core.metrics import STEP_TOKEN_BOUNDS, EngineMetrics, PhaseSeconds
from sightline.core.request import SamplingParams
from sightline.server.process.child import inherited_socket
from sightline.server.process.frames import LENGTH_BYTES, TOKEN_BYTES
from sightline.server.process.protocol import (
    Accepted,
    Cancel,
    Command,
    Configure,
    Delta,
    Ended,
    Failed,
    Loading,
    Opened,
    Probe,
    Progress,
    Read,
    Refused,
    Report,
    Stop,
    Submit,
    command_codec,
    report_codec,
)
from sightline.text.tokenizers.tokenizer import PromptTokens, TokenizerData

DEADLY, HANGING, FAILING = 666, 667, 668
MAX_MODEL_LEN, VOCAB_SIZE, MAX_ROWS = 256, 257, 4
PHASES = PhaseSeconds(0.001, 0.002, 0.003)
"""What every request is said to have taken."""
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.reasoning_content or '' }};{% endfor %}"


@dataclass
class _Job:
    params: SamplingParams
    max_tokens: int
    done: int = 0


def tokenizer_data() -> TokenizerData:
    """A token for each byte."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {**{f"<0x{byte:02X}>": byte for byte in range(256)}, "<end>": 256}, [], byte_fallback=True
        )
    )
    backend.decoder = tokenizers.decoders.ByteFallback()
    return TokenizerData(backend.to_str(), PromptTokens(None, frozenset({256})), TEMPLATE, None, None)


class FakeEngine:
    """The other end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._commands, self._reports = command_codec(), report_codec()
        self._jobs: dict[int, _Job] = {}
        self._steps = 0

    def run(self) -> None:
        [configure] = self._read()
        assert isinstance(configure, Configure)
        settings = dict(part.partition("=")[::2] for part in (configure.config.model or "").split(",") if part)
        if "silent" in settings:
            os._exit(7)
        if "fail" in settings:
            self._send(Failed(f"it was asked to fail: {settings['fail']}"))
            return
        self._send(Loading("reading weights (0 of 9)"))
        time.sleep(float(settings.get("opening", 0.0)))
        queued = configure.config.max_queued_requests
        self._send(
            Opened(
                "fake",
                msgspec.msgpack.encode(tokenizer_data()),
                VOCAB_SIZE,
                None,
                MAX_MODEL_LEN,
                MAX_ROWS,
                queued,
                {"fake": True},
                ("fake",),
                (),
                (),
            )
        )
        delay = float(settings.get("delay", 0.0))
        while True:
            while select.select([self._socket], [], [], 0.0 if self._jobs else None)[0]:
                for command in self._read():
                    self._obey(command)
            time.sleep(delay)
            self._step()

    def _obey(self, command: Command) -> None:
        match command:
            case Submit(prompts, bytes() as packed):
                params = msgspec.msgpack.decode(packed, type=SamplingParams)
                for number, prompt in prompts.items():
                    self._submit(number, len(prompt) // TOKEN_BYTES, params)
            case Cancel(number):
                self._jobs.pop(number, None)
                self._tell_progress()
            case Read():
                pass
            case Probe():
                self._steps += 1
                self._tell_progress()
            case Stop():
                os._exit(0)
            case _:
                os._exit(3)

    def _submit(self, number: int, prompt_len: int, params: SamplingParams) -> None:
        if params.seed == DEADLY:
            os.kill(os.getpid(), 9)
        if params.seed == HANGING:
            time.sleep(1e6)
        if params.temperature == 99.0:
            self._send(Refused(number, is_full=False, message="expected another temperature, got 99"))
            return
        room = MAX_MODEL_LEN - prompt_len
        job = _Job(params, min(params.max_tokens or room, room))
        self._jobs[number] = job
        self._send(Accepted(number, msgspec.json.encode({"seed": params.seed or 0, "n": params.n})))

    def _step(self) -> None:
        reports: list[Report] = []
        self._steps += 1
        for number, job in tuple(self._jobs.items())[:MAX_ROWS]:
            text, job.done = f"{job.done} ", job.done + 1
            is_failing = job.params.seed == FAILING and job.done == 3
            is_over = job.done >= job.max_tokens or is_failing
            reason = ("error" if is_failing else "length") if is_over else None
            reports += [Delta(number, index, text, 1, reason) for index in range(job.params.n)]
            if is_over:
                reports.append(Ended(number, "it was asked to fail" if is_failing else None, 0, PHASES, None))
                del self._jobs[number]
        if reports:
            self._socket.sendall(self._reports.encode(reports))
        self._tell_progress()

    def _tell_progress(self) -> None:
        none: dict[str, int] = {}
        tokens = (self._steps, *[0] * len(STEP_TOKEN_BOUNDS))
        counts = (
            0,
            0,
            0.0,
            0,
            0,
            0,
            0,
            0,
            0,
            none,
            0,
            self._steps,
            0,
            0,
            0,
            0.0,
            0,
            0,
            0.0,
            0,
            tokens,
            self._steps,
            0,
            0,
            0,
            (),
        )
        self._send(Progress(EngineMetrics(len(self._jobs), *counts)))

    def _send(self, report: Report) -> None:
        self._socket.sendall(self._reports.encode([report]))

    def _read(self) -> list[Command]:
        header = self._socket.recv(LENGTH_BYTES, socket.MSG_WAITALL)
        if len(header) < LENGTH_BYTES:
            os._exit(0)
        return self._commands.decode(self._socket.recv(self._commands.length(header), socket.MSG_WAITALL))


if __name__ == "__main__":
    FakeEngine(inherited_socket(sys.argv[1])).run()
