"""Several ranks as threads of one process, connected by gloo."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch._C._distributed_c10d import HashStore

from sightline.core.device import detect_device
from sightline.distributed.collectives import Collectives, GroupCollectives
from sightline.distributed.ranks import Rank

ResultT = TypeVar("ResultT")
TIMEOUT_S = 60.0


def of_ranks(size: int, work: Callable[[Collectives], ResultT]) -> list[ResultT]:
    """What `work` returns on each of the ranks, which do it at once."""
    store = HashStore()

    def one(index: int) -> ResultT:
        collectives = GroupCollectives(Rank(index, size), store, detect_device("cpu"), TIMEOUT_S)
        try:
            return work(collectives)
        finally:
            collectives.close()

    with ThreadPoolExecutor(size) as pool:
        return [each.result() for each in [pool.submit(one, index) for index in range(size)]]
