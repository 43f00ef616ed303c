"""The process of a rank that follows: builds its part of the model, and carries out orders until the last one.

    python -m sightline.runner.rank_process SOCKET RING

It ends when the leading rank does, whatever it is doing then.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import threading
import time
import traceback

import torch
from torch._C._distributed_c10d import FileStore

from sightline.core.device import DeviceKind, detect_device
from sightline.core.errors import RankLostError
from sightline.core.ledger import Ledger
from sightline.distributed import control
from sightline.distributed.collectives import connect
from sightline.distributed.ranks import Place, Rank
from sightline.distributed.ring import RingReceiver
from sightline.models.loading.opening import open_checkpoint
from sightline.runner.build import build_runtime, make_recorder
from sightline.runner.following import Follower
from sightline.runner.roles import Follows

logger = logging.getLogger("sightline")
START_SECONDS = 3600.0
"""How long ranks wait for each other while some compile kernels. Later, the leading one looks after them."""
BEAT_SECONDS = 0.2
"""How often a rank shows that it is alive."""


def main(arguments: list[str]) -> int:
    """Runs the rank. Returns the exit code of the process."""
    connection, ring = socket.socket(fileno=int(arguments[0])), int(arguments[1])
    os.set_inheritable(connection.fileno(), False)
    start = control.receive(connection)
    if not isinstance(start, control.RankStart):
        raise RankLostError(f"expected to be told how to start, got {start}")
    size = start.config.num_ranks
    receiver = RingReceiver(ring, size - 1, start.index - 1, connection)
    threading.Thread(target=_stay_alive, args=(connection, receiver), daemon=True).start()
    try:
        _follow(start, connection, receiver)
    except RankLostError as error:
        logger.info("rank %d of %d ends: %s", start.index, size, error)
        return 1
    except Exception as error:
        control.send(connection, control.RankFailed(f"{type(error).__name__}: {error}", traceback.format_exc()))
        # At once: the leading rank looks for the cause.
        os._exit(1)
    return 0


def _follow(start: control.RankStart, connection: socket.socket, receiver: RingReceiver) -> None:
    config = start.config
    torch.set_num_threads(start.num_threads)
    if detect_device(config.device).kind is DeviceKind.CUDA:
        torch.cuda.set_device(start.index)
    place, ledger = Place(Rank(start.index, config.num_ranks), config.data_parallel_size), Ledger()
    assert config.model is not None
    control.send(connection, control.RankHere())
    store = FileStore(start.store, config.num_ranks)
    num_lanes = 2 if config.enable_two_batch_overlap else 1
    role = Follows(connect(place, store, detect_device(config.device), START_SECONDS, num_lanes))
    runtime = build_runtime(config, open_checkpoint(config.model, ledger), ledger, role=role)
    control.send(connection, control.RankReady())
    follower = Follower(role, runtime, receiver, make_recorder(runtime))
    while follower.follow():
        pass
    role.close()


def _stay_alive(connection: socket.socket, receiver: RingReceiver) -> None:
    """Shows that the process is alive, and ends it when the leading rank is gone, even if a step hangs."""
    hung_up = select.poll()
    hung_up.register(connection.fileno(), 0)
    while not hung_up.poll(0):
        receiver.beat()
        time.sleep(BEAT_SECONDS)
    # A last order may still be carried out, if that takes no time.
    time.sleep(5 * BEAT_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
