"""A desk: a process that reads bodies and writes answers, one at a time, until the front end is gone.

Whatever a job raises becomes its result: a Rust panic of the tokenizer too, which is no `Exception`. A job that never
ends is ended by the front end, which kills the process, or by the system if the front end is gone. Keeps nothing
between two jobs, and ends after one that left the process in doubt.
"""

from __future__ import annotations

import resource
import signal
import socket
import sys
from collections.abc import Mapping
from io import BufferedReader
from traceback import extract_tb
from typing import Any, assert_never

from sightline.server.desks.forms.chat import ChatForm
from sightline.server.desks.forms.completion import CompletionForm
from sightline.server.desks.forms.embeddings import EmbedForm, RerankForm, ScoreForm
from sightline.server.desks.forms.form import EngineForm, Form, ServedModel
from sightline.server.desks.forms.messages import CountForm, MessagesForm
from sightline.server.desks.forms.responses import ResponsesForm
from sightline.server.desks.forms.tokens import DetokenizeForm, TokenizeForm
from sightline.server.desks.protocol import (
    Broken,
    Declined,
    FormName,
    Job,
    ReadBody,
    Ready,
    Result,
    Setup,
    WriteAnswer,
    job_codec,
    result_codec,
)
from sightline.server.http.errors import ApiError
from sightline.server.logs import log_as_json
from sightline.server.process.child import inherited_socket
from sightline.server.process.frames import LENGTH_BYTES

ORPHAN_SECONDS = 5.0
"""Time beyond that of a job after which the system ends the desk: by then the front end would have."""
MAX_JOB_MEMORY = 2 << 30
"""Memory that a job may take beyond what the desk holds."""


class BodyDesk:
    """Does the jobs of one process."""

    def __init__(self, setup: Setup) -> None:
        model = ServedModel(setup)
        self._writers: Mapping[FormName, EngineForm[Any, Any, Any]] = (
            {
                FormName.CHAT: ChatForm(model),
                FormName.COMPLETION: CompletionForm(model),
                FormName.RESPONSES: ResponsesForm(model),
                FormName.MESSAGES: MessagesForm(model),
            }
            if setup.vector_size is None
            else {
                FormName.EMBED: EmbedForm(model),
                FormName.SCORE: ScoreForm(model),
                FormName.RERANK: RerankForm(model),
            }
        )
        self._readers: Mapping[FormName, Form[Any]] = {
            **self._writers,
            FormName.COUNT: CountForm(model),
            FormName.TOKENIZE: TokenizeForm(model),
            FormName.DETOKENIZE: DetokenizeForm(model),
        }

    def do(self, job: Job) -> Result:
        """The result of a job."""
        try:
            match job:
                case ReadBody():
                    return self._readers[job.form].read(job)
                case WriteAnswer():
                    return self._writers[job.form].write(job)
                case Setup():
                    raise ValueError("expected a job, got a second Setup")
                case _:
                    assert_never(job)
        except ApiError as error:
            return Declined(_number(job), error.status, error.message, error.kind, error.param, error.code)
        except BaseException as error:
            where = tuple(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in extract_tb(error.__traceback__))
            is_last = not isinstance(error, Exception) or isinstance(error, MemoryError)
            return Broken(_number(job), type(error).__name__, where, is_last)


def _number(job: Job) -> int:
    return 0 if isinstance(job, Setup) else job.number


def serve_desk(connection: socket.socket) -> None:
    """Does jobs until the other end of the connection is closed."""
    jobs, results = job_codec(), result_codec()

    def next_job(stream: BufferedReader) -> Job | None:
        header = stream.read(LENGTH_BYTES)
        if len(header) < LENGTH_BYTES:
            return None
        [job] = jobs.decode(stream.read(jobs.length(header)))
        return job

    with connection.makefile("rb") as stream:
        setup = next_job(stream)
        if not isinstance(setup, Setup):
            return
        log_as_json(setup.log_level)
        desk = BodyDesk(setup)
        _limit_memory()
        connection.sendall(results.encode([Ready()]))
        # The alarm's default action ends the process even if a library holds the GIL.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        while (job := next_job(stream)) is not None:
            signal.setitimer(signal.ITIMER_REAL, setup.seconds + ORPHAN_SECONDS)
            result = desk.do(job)
            connection.sendall(results.encode([result]))
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            if isinstance(result, Broken) and result.is_last:
                return


def _limit_memory() -> None:
    """Makes the system refuse memory to a job that wants far too much, where it can."""
    if sys.platform != "linux":
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[5]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + MAX_JOB_MEMORY, hard))


def main() -> None:
    """The entry point: `python -m sightline.server.desks.worker FILE_DESCRIPTOR`."""
    # A terminal's Ctrl-C reaches every process; the front end decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    log_as_json()
    with inherited_socket(sys.argv[1]) as connection:
        serve_desk(connection)


if __name__ == "__main__":
    main()
