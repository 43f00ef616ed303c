"""Several ranks as threads of one process, connected by gloo."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch._C._distributed_c10d import HashStore

from sightline.core.device import detect_device
from sightline.distributed.collectives import Links, connect
from sightline.distributed.ranks import Place, Rank

ResultT = TypeVar("ResultT")
TIMEOUT_S = 60.0


def of_ranks(size: int, work: Callable[[Links], ResultT], num_replicas: int = 1) -> list[ResultT]:
    """What `work` returns on each of the ranks, which do it at once."""
    store = HashStore()

    def one(index: int) -> ResultT:
        links = connect(Place(Rank(index, size), num_replicas), store, detect_device("cpu"), TIMEOUT_S)
        try:
            found = work(links)
            # A rank that closes its connections fails those that still make theirs.
            links.everyone.least([0])
            return found
        finally:
            links.close()

    with ThreadPoolExecutor(size) as pool:
        return [each.result() for each in [pool.submit(one, index) for index in range(size)]]
