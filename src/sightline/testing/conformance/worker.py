"""A process that tries checks for `crew`, one at a time, until its connection ends.

python -m sightline.testing.conformance.worker FD        FD is this end of the connection
"""

from __future__ import annotations

import os
import sys
from queue import SimpleQueue
from threading import Thread

import torch

from sightline.core.errors import ConfigError
from sightline.testing.conformance.errands import Brief, Desk, Errand, ErrandResult, packed, unpacked
from sightline.testing.conformance.line import Line


def main() -> None:
    torch.set_num_threads(1)
    line = Line.at(int(sys.argv[1]))
    received: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_receive, args=(line, received), daemon=True).start()
    try:
        desk = Desk(unpacked(received.get(), Brief))
    except Exception as error:  # the border to other people's code: what cannot begin says nothing about a backend
        line.send(packed(ErrandResult(None, f"expected a process that can try checks, got {_told(error)}")))
        return
    try:
        while True:
            line.send(packed(ErrandResult(desk.attempt(unpacked(received.get(), Errand)), None)))
    except ConfigError as error:
        line.send(packed(ErrandResult(None, str(error))))


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}; try fewer jobs"


def _receive(line: Line, received: SimpleQueue[bytes]) -> None:
    """Ends the process with the connection, also in the middle of a check, as soon as that lets another thread run:
    whoever would read its result is gone."""
    try:
        while True:
            received.put(line.receive())
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    main()
