"""Operations that all ranks do together. Every rank calls the same ones, in the same order, with the same shapes.

Collectives           the interface
LoneCollectives       of a rank that has no others: nothing is exchanged
GroupCollectives      by torch.distributed: gloo between CPUs, NCCL between GPUs
"""

from __future__ import annotations

import datetime
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from sightline.core.device import Device, DeviceKind
from sightline.core.environment import keep_ranks_local
from sightline.core.errors import RankLostError
from sightline.distributed.ranks import ALONE, Rank


class Collectives(ABC):
    """What a rank does together with the others. Raises `RankLostError` if one of them does not take part."""

    rank: Rank

    @abstractmethod
    def sum(self, x: Tensor) -> None:
        """Replaces x by its sum over all ranks. Its memory must be without gaps, in any order of dimensions."""

    @abstractmethod
    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """The parts [rows, width] of all ranks side by side. `widths` has the width of each rank's part."""

    @abstractmethod
    def broadcast(self, x: Tensor) -> None:
        """Replaces x, which is contiguous, by that of the leading rank."""

    @abstractmethod
    def least(self, numbers: Sequence[int]) -> list[int]:
        """The least of each number over all ranks."""

    @contextmanager
    def in_lane(self, lane: int) -> Iterator[None]:
        """Lets the calling thread use the connections of a lane: those of two lanes may be used at once."""
        del lane
        yield

    @abstractmethod
    def limit(self, seconds: float) -> None:
        """Sets how long to wait for a rank that takes no part."""

    @abstractmethod
    def close(self) -> None:
        """Ends the connection to the other ranks, which fails what they still wait for."""


class LoneCollectives(Collectives):
    """Those of a rank without others."""

    rank = ALONE

    def sum(self, x: Tensor) -> None:
        del x

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        del widths
        return part

    def broadcast(self, x: Tensor) -> None:
        del x

    def least(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def limit(self, seconds: float) -> None:
        del seconds

    def close(self) -> None:
        """Nothing is open."""


LONE = LoneCollectives()


class _Lane(threading.local):
    """The lane whose connections a thread uses."""

    lane = 0


class GroupCollectives(Collectives):
    """Those of several ranks that found each other through a store."""

    def __init__(self, rank: Rank, store: Store, device: Device, timeout_s: float, num_lanes: int = 1) -> None:
        """Every rank of the group must construct its own with the same store. Then they are connected.

        A rank that does not take part within `timeout_s` counts as lost.
        """
        self._here = _Lane()
        self.rank = rank
        self._device = device.torch_device
        timeout = datetime.timedelta(seconds=timeout_s)
        self._groups = [
            _make_group(rank, PrefixStore(f"lane {lane}", store), device.kind, timeout) for lane in range(num_lanes)
        ]

    def sum(self, x: Tensor) -> None:
        if x.numel():
            self._wait("a sum", self._group.allreduce, [x.as_strided((x.numel(),), (1,), x.storage_offset())])

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        # Parts of one width, because only those are exchanged in one call on every kind of device.
        rows, widest = len(part), max(widths)
        padded = part.new_zeros((rows, widest))
        padded[:, : part.shape[1]].copy_(part)
        received = part.new_empty((self.rank.size, rows, widest))
        if padded.numel():
            self._wait("a gathering", self._group.allgather, [list(received.unbind(0))], [padded])
        return torch.cat([each[:, :width] for each, width in zip(received.unbind(0), widths, strict=True)], dim=1)

    def broadcast(self, x: Tensor) -> None:
        if x.numel():
            self._wait("a broadcast", self._group.broadcast, [x])

    def least(self, numbers: Sequence[int]) -> list[int]:
        # On the device, because NCCL connects nothing else.
        found = torch.tensor(list(numbers), dtype=torch.int64, device=self._device)
        self._wait("an agreement", self._group.allreduce, [found], dist.ReduceOp.MIN)
        agreed: list[int] = found.tolist()
        return agreed

    def limit(self, seconds: float) -> None:
        for group in self._groups:
            backend: Any = group
            backend._set_default_timeout(datetime.timedelta(seconds=seconds))

    def close(self) -> None:
        for group in self._groups:
            group.abort()

    @contextmanager
    def in_lane(self, lane: int) -> Iterator[None]:
        before, self._here.lane = self._here.lane, lane
        try:
            yield
        finally:
            self._here.lane = before

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._groups[self._here.lane]

    def _wait(self, what: str, start: Callable[..., dist.Work], *operands: object) -> None:
        """Starts an operation and waits for it; on a GPU, lets the stream wait."""
        try:
            start(*operands).wait()
        except RuntimeError as error:
            cause = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RankLostError(
                f"{self.rank} waited for the others in {what}, and at least one did not take part: {cause}"
            ) from error


def _make_group(rank: Rank, store: Store, device: DeviceKind, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """A group of its own, not torch's default one: several engines of one process have several."""
    group: object
    if device is DeviceKind.CUDA:
        keep_ranks_local()
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = dist.ProcessGroupNCCL(store, rank.index, rank.size, options)
    else:
        # Only on this machine: nobody else may connect.
        gloo: Any = dist.ProcessGroupGloo
        local = gloo._Options()
        local._devices = [gloo.create_device(hostname="127.0.0.1")]
        local._timeout = timeout
        group = gloo(store, rank.index, rank.size, local)
    return cast(dist.ProcessGroup, group)  # both have its methods, which torch's stubs do not say
