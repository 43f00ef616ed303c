"""The processes of the other ranks, as the leading one sees them: started, watched, told, and ended.

    start ─▶ each opens the model ─▶ connected ─▶ each loads its part ─▶ Ready ─▶ orders … ─▶ the last one
                                         └────────── one dies or stalls: all end, with its name and the cause

Does not know what an order says.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import FileStore

from sightline.core.config import EngineConfig
from sightline.core.device import Device, DeviceKind, detect_device
from sightline.core.errors import ConfigError, RankLostError
from sightline.distributed import control
from sightline.distributed.channels import OrderSender
from sightline.distributed.collectives import NO_LINKS, Links, connect
from sightline.distributed.ranks import Place, Rank
from sightline.distributed.ring import RingSender, make_ring_file
from sightline.runner.roles import Leads

logger = logging.getLogger("sightline")
COMMAND = (sys.executable, "-P", "-m", "sightline.runner.rank_process")
WATCH_SECONDS = 0.05
START_SECONDS = 3600.0
"""How long ranks may take to load their parts, and to compile what the first steps need."""
STOP_SECONDS = 5.0
"""How long ranks may take to end once they are told to."""
CAUSE_SECONDS = 2.0
"""How long to look for the rank whose end broke a step off."""


class Member(NamedTuple):
    """The process of one other rank."""

    number: int
    process: subprocess.Popen[bytes]
    connection: socket.socket

    def __str__(self) -> str:
        return f"rank {self.number} (process {self.process.pid})"


class RankWatch:
    """What is known of the processes. A thread looks at them until the crew is closed."""

    def __init__(self, members: Sequence[Member], ring: RingSender, timeout_s: float) -> None:
        self.cause = ""
        """Which rank is lost, and how; empty as long as none is."""
        self.lost, self.closing = threading.Event(), threading.Event()
        self.is_serving = threading.Event()
        """Set once a rank that shows no life for `timeout_s` is lost; before, it may be loading."""
        self.links: Links = NO_LINKS
        """Those that wait for ranks, once they are connected."""
        self._members = tuple(members)
        self._ring = ring
        self._timeout_s = timeout_s

    def run(self) -> None:
        """Notices ranks that end or show no life."""
        seen = {member.number: (0, time.monotonic()) for member in self._members}
        while not self.closing.wait(WATCH_SECONDS) and not self.cause:
            now, limit = time.monotonic(), self._timeout_s if self.is_serving.is_set() else START_SECONDS
            for member, beats in zip(self._members, self._ring.beats(), strict=True):
                before, since = seen[member.number]
                if member.process.poll() is not None:
                    self._tell(f"{member} {_end_of(member.process)}{self._last_words(member)}")
                elif beats != before or not beats:
                    seen[member.number] = (beats, now)
                elif now - since > limit:
                    member.process.kill()
                    self._tell(f"{member} showed no life for {limit:g} s and was killed")

    def _last_words(self, member: Member) -> str:
        """The error that a rank sent before it ended. While ranks start, the starting thread reads them."""
        if not self.is_serving.is_set():
            return ""
        try:
            report = control.receive(member.connection)
        except RankLostError:
            return ""
        if not isinstance(report, control.RankFailed):
            return ""
        logger.error("%s raised: %s", member, report.details)
        return f": {report.error}"

    def _tell(self, cause: str) -> None:
        if self.closing.is_set() or self.cause:
            return
        logger.error("the model's ranks end: %s", cause)
        self.cause = cause
        self.lost.set()
        # What waits on a GPU for a rank that is gone waits for ever.
        self.links.close()


class Crew(OrderSender):
    """The other ranks' processes. They end with it."""

    def __init__(self, config: EngineConfig, device: Device) -> None:
        """Starts the processes of an engine, and connects them. Its model must be a place on this machine."""
        size = config.num_ranks
        if device.kind is DeviceKind.CUDA and torch.cuda.device_count() < size:
            raise ConfigError(
                f"expected {size} GPUs for tensor_parallel_size {config.tensor_parallel_size} and data_parallel_size "
                f"{config.data_parallel_size}, got {torch.cuda.device_count()}; lower one of them"
            )
        self._timeout_s = config.dist_timeout
        self._is_ready = False
        self._folder = Path(tempfile.mkdtemp(prefix="sightline-ranks-"))
        self._threads_before = torch.get_num_threads()
        self._members = list[Member]()
        self._end = weakref.finalize(self, _end, self._members, self._folder)
        try:
            self._ring = self._start(size)
            self._watch = RankWatch(self._members, self._ring, self._timeout_s)
            threading.Thread(target=self._watch.run, name="ranks", daemon=True).start()
            self.links = self._watch.links = self._connect(config, device)
        except BaseException:
            self._end()
            raise

    def _start(self, size: int) -> RingSender:
        descriptor = make_ring_file(size - 1)
        try:
            for index in range(1, size):
                self._members.append(_start_member(index, descriptor))
            return RingSender(descriptor, [each.connection for each in self._members], self._timeout_s)
        finally:
            os.close(descriptor)

    def _connect(self, config: EngineConfig, device: Device) -> Links:
        size, is_cpu, store = config.num_ranks, device.kind is DeviceKind.CPU, str(self._folder / "ranks")
        num_threads = max(1, self._threads_before // size) if is_cpu else self._threads_before
        torch.set_num_threads(num_threads)
        for member in self._members:
            self._tell(member, control.RankStart(member.number, config, store, num_threads))
        for member in self._members:
            self._expect(member, control.RankHere)
        num_lanes = 2 if config.enable_two_batch_overlap else 1
        place = Place(Rank(0, size), config.data_parallel_size)
        return connect(place, FileStore(store, size), device, START_SECONDS, num_lanes)

    def _tell(self, member: Member, start: control.RankStart) -> None:
        try:
            control.send(member.connection, start)
        except RankLostError as error:
            raise RankLostError(self.why_lost() or f"{member}: {error}") from error

    def wait_until_ready(self) -> None:
        for member in self._members:
            self._expect(member, control.RankReady)
        self._is_ready = True

    def _expect(self, member: Member, kind: type[control.RankHere] | type[control.RankReady]) -> None:
        try:
            report = control.receive(member.connection)
        except RankLostError as error:
            raise RankLostError(self.why_lost() or f"{member}: {error}") from error
        if isinstance(report, control.RankFailed):
            logger.error("%s raised: %s", member, report.details)
            raise RankLostError(f"{member} could not start: {report.error}")
        if not isinstance(report, kind):
            raise RankLostError(f"expected {member} to report {kind.__name__}, got {report}")

    def begin_serving(self) -> None:
        self.links.limit(self._timeout_s)
        self._watch.is_serving.set()

    def send(self, message: bytes) -> None:
        if self._watch.cause:
            raise RankLostError(self._watch.cause)
        try:
            self._ring.send(message)
        except RankLostError as error:
            raise RankLostError(self.why_lost() or str(error)) from error

    def why_lost(self) -> str:
        self._watch.lost.wait(CAUSE_SECONDS)
        return self._watch.cause

    def close(self) -> None:
        """Waits for the ranks, which were told to stop, and ends those that do not. Idempotent."""
        self._watch.closing.set()
        deadline = time.monotonic() + (STOP_SECONDS if self._is_ready and not self._watch.cause else 0.0)
        for member in self._members:
            with suppress(subprocess.TimeoutExpired):
                member.process.wait(max(0.0, deadline - time.monotonic()))
        self._end()
        torch.set_num_threads(self._threads_before)


def _end(members: Sequence[Member], folder: Path) -> None:
    """Ends what is left of the processes, and of the folder in which they found each other."""
    for member in members:
        member.process.kill()
        member.process.wait()
        member.connection.close()
    shutil.rmtree(folder, ignore_errors=True)


def _start_member(index: int, ring: int) -> Member:
    ours, theirs = socket.socketpair()
    with theirs:
        os.set_inheritable(theirs.fileno(), True)
        os.set_inheritable(ring, True)
        process = subprocess.Popen(
            [*COMMAND, str(theirs.fileno()), str(ring)],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), ring),
            start_new_session=True,
        )
    return Member(index, process, ours)


def _end_of(process: subprocess.Popen[bytes]) -> str:
    """How a process ended, in words."""
    code = process.returncode
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def lead(config: EngineConfig, location: Path) -> Leads:
    """Starts the other ranks of an engine, for the model at this place. Closing the role ends them."""
    crew = Crew(replace(config, model=str(location)), detect_device(config.device))
    return Leads(crew.links, crew)
