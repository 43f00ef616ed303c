"""A process that tries checks for `crew`, one at a time, until its connection closes.

    python -m sightline.testing.conformance.worker FD

FD is this end of a `multiprocessing.Pipe`. The first message is a `Brief`, each later one an `Errand`. The answer to an
errand is a `CheckResult`; a `ConfigError` instead ends the run without failing a check.
"""

from __future__ import annotations

import os
import pickle
import sys
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread

import torch

from sightline.core.errors import ConfigError
from sightline.testing.conformance.errands import Desk


def main() -> None:
    torch.set_num_threads(1)
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    received: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_receive, args=(connection, received), daemon=True).start()
    try:
        desk = Desk(pickle.loads(received.get()))
    except Exception as error:  # whatever importing a backend or a check raises
        connection.send(ConfigError(f"expected a process that can try checks, got {_told(error)}"))
        return
    try:
        while True:
            connection.send(desk.attempt(pickle.loads(received.get())))
    except ConfigError as error:
        connection.send(ConfigError(str(error)))


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}; try fewer jobs"


def _receive(connection: Connection, received: SimpleQueue[bytes]) -> None:
    """Exits the process when the connection closes, even in the middle of a check: nobody would read its result."""
    try:
        while True:
            received.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    main()
