"""A process that tries checks for `crew`, one at a time, until its connection ends.

python -m sightline.testing.worker FD        FD is this end of the connection
"""

from __future__ import annotations

import os
import pickle
import sys
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread

import torch

from sightline.core.device import DeviceKind
from sightline.core.errors import ConfigError
from sightline.testing.errands import Brief, Desk, Refusal


def main() -> None:
    torch.set_num_threads(1)
    connection = Connection(int(sys.argv[1]))
    # What a backend starts in turn must not keep the connection open.
    os.set_inheritable(connection.fileno(), False)
    received: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_receive, args=(connection, received), daemon=True).start()
    try:
        brief = Brief.unpacked(received.get())
        if brief.device.kind is DeviceKind.CUDA:
            torch.cuda.set_device(brief.device.torch_device)
        desk = Desk(brief)
        while True:
            connection.send(desk.attempt(pickle.loads(received.get())))
    except ConfigError as error:
        connection.send(Refusal(str(error)))


def _receive(connection: Connection, received: SimpleQueue[bytes]) -> None:
    """Ends the process with the connection, also in the middle of a check: whoever would read its result is gone."""
    try:
        while True:
            received.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    main()
