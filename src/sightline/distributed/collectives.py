"""Operations that all ranks do together. Every rank calls the same ones, in the same order, with the same shapes.

Collectives           the interface
LoneCollectives       of a rank that has no others: nothing is exchanged
GroupCollectives      by torch.distributed: gloo between CPUs, NCCL between GPUs
Links                 the groups that a process belongs to
"""

from __future__ import annotations

import datetime
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from sightline.core.device import Device, DeviceKind
from sightline.core.environment import keep_ranks_local
from sightline.core.errors import RankLostError
from sightline.distributed.ranks import ALONE, FIRST, Place, Rank


class Collectives(ABC):
    """What a rank does together with the others. Raises `RankLostError` if one of them does not take part."""

    rank: Rank

    @abstractmethod
    def sum(self, x: Tensor) -> None:
        """Replaces x by its sum over all ranks. Its memory must be without gaps, in any order of dimensions."""

    @abstractmethod
    def gather(self, part: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """The parts of all ranks, one after another in a dimension. `sizes` has the size of each rank's part in it."""

    @abstractmethod
    def stack(self, part: Tensor, out: Tensor) -> None:
        """Writes the parts [n, …] of all ranks, one after another, to `out` [ranks * n, …]. Both are contiguous."""

    @abstractmethod
    def sum_of_part(self, parts: Tensor, out: Tensor) -> None:
        """The opposite of `stack`: sums the parts of all ranks in `parts` and writes this rank's to `out`."""

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

    def gather(self, part: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        del sizes, dim
        return part

    def stack(self, part: Tensor, out: Tensor) -> None:
        out.copy_(part)

    def sum_of_part(self, parts: Tensor, out: Tensor) -> None:
        out.copy_(parts)

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

    def gather(self, part: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        # Parts of one size, because only those are exchanged in one call on every kind of device.
        shape = list(part.shape)
        shape[dim] = max(sizes)
        padded = part.new_zeros(shape)
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        received = part.new_empty((self.rank.size, *shape))
        if padded.numel():
            self._wait("a gathering", self._group.allgather, [list(received.unbind(0))], [padded])
        parts = zip(received.unbind(0), sizes, strict=True)
        return torch.cat([each.narrow(dim, 0, size) for each, size in parts], dim=dim)

    def stack(self, part: Tensor, out: Tensor) -> None:
        if part.numel():
            self._wait("an exchange of rows", self._group._allgather_base, out, part)

    def sum_of_part(self, parts: Tensor, out: Tensor) -> None:
        if out.numel():
            self._wait("a sum of rows", self._group._reduce_scatter_base, out, parts)

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


@dataclass(frozen=True)
class Links:
    """The groups that a process belongs to. All processes use them in the same order."""

    place: Place
    everyone: Collectives
    """All ranks."""
    within: Collectives
    """The ranks of its replica."""
    across: Collectives
    """The ranks that have its place in the other replicas."""

    @contextmanager
    def in_lane(self, lane: int) -> Iterator[None]:
        """Lets the calling thread use the connections of a lane in every group."""
        with ExitStack() as stack:
            for each in self._groups():
                stack.enter_context(each.in_lane(lane))
            yield

    def limit(self, seconds: float) -> None:
        """Sets how long to wait for a rank that takes no part."""
        for each in self._groups():
            each.limit(seconds)

    def close(self) -> None:
        """Ends all connections, which fails what still waits for one."""
        for each in self._groups():
            each.close()

    def _groups(self) -> set[Collectives]:
        """Each group once: that of a replica is that of everyone if there is one replica."""
        return {self.everyone, self.within, self.across}


NO_LINKS = Links(FIRST, LONE, LONE, LONE)


def connect(place: Place, store: Store, device: Device, timeout_s: float, num_lanes: int = 1) -> Links:
    """Connects a process with the others, each of which must connect itself with the same store."""

    def group(name: str, rank: Rank) -> Collectives:
        return GroupCollectives(rank, PrefixStore(name, store), device, timeout_s, num_lanes)

    within, replica = place.within, place.replica
    everyone = group("everyone", place.rank)
    if replica.is_alone:
        return Links(place, everyone, everyone, LONE)
    if within.is_alone:
        return Links(place, everyone, LONE, everyone)
    inside = group(f"replica {replica.index}", within)
    return Links(place, everyone, inside, group(f"ranks {within.index}", replica))


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
