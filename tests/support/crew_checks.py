"""Checks and a backend that other processes can import, some of which no process survives."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from sightline.attention.backends.reference.backend import ReferenceBackend
from sightline.attention.capability import ANY, Capability, HostLengths
from sightline.attention.contract import AttentionBackend
from sightline.attention.dimensions import Dimension
from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.selection import Candidate
from sightline.core.device import DeviceKind
from sightline.testing.conformance.rig import Subject
from sightline.testing.conformance.trial import Check, Trial, fail

SINGLE = Capability(
    spec_kinds=frozenset({SpecKind.SOFTMAX}),
    devices=frozenset({DeviceKind.CPU}),
    compute_capabilities=ANY,
    dtypes=frozenset({torch.float32}),
    cache_dtypes=frozenset({torch.float32}),
    head_dims=ANY,
    group_sizes=ANY,
    page_sizes=ANY,
    features=frozenset({Feature.WINDOW}),
    host_lengths=HostLengths.EXACT,
)
HALF = replace(SINGLE, dtypes=frozenset({torch.float16}))
_BROKEN = "SIGHTLINE_TESTS_BROKEN"


class Stub(ReferenceBackend):
    capabilities: ClassVar[tuple[Capability, ...]] = (SINGLE, HALF)


def _load() -> type[AttentionBackend[Any, Any]]:
    return Stub


def _rows() -> tuple[Capability, ...]:
    return Stub.capabilities


STUB = Candidate("stub", False, "a-package", _load, _rows)


def _passes(trial: Trial) -> None:
    trial.progress.num_steps += 1


def _speaks(trial: Trial) -> None:
    print("noise", flush=True)
    trial.progress.num_steps += max(trial.samples.page_sizes)
    trial.progress.points += [{Dimension.PAGE_SIZE: size} for size in trial.samples.page_sizes]


def _fails_in_half(trial: Trial) -> None:
    trial.progress.case = "a case"
    if trial.dtype is torch.float16:
        fail("expected more, got half")


def _raises_in_half(trial: Trial) -> None:
    if trial.dtype is torch.float16:
        raise RuntimeError("out of luck")


def _counts_bricks(trial: Trial) -> None:
    trial.progress.num_steps += sum(trial.share.of(range(100)))


def _finds_a_crack_in_half(trial: Trial) -> None:
    for brick in trial.share.of(range(5)):
        trial.progress.num_steps += 1
        trial.progress.case = f"brick {brick}"
        if trial.dtype is torch.float16 and brick == 4:
            fail("expected it whole, got a crack")


def _no_sky(subject: Subject) -> str:
    return f"no sky is declared in {subject.name}"


def _exits(trial: Trial) -> None:
    os._exit(3)


def _forks_and_exits(trial: Trial) -> None:
    """What is forked holds on to whatever its parent had open."""
    if os.fork() == 0:
        time.sleep(60)
    os._exit(4)


def _is_killed(trial: Trial) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _breaks_its_process(trial: Trial) -> None:
    os.environ[_BROKEN] = "yes"
    fail("expected care, got none")


def _needs_a_whole_process(trial: Trial) -> None:
    trial.require(_BROKEN not in os.environ, "expected a process that nothing broke, got one that a check did")


def _takes_a_while(trial: Trial) -> None:
    time.sleep(1.0)


def _has_no_neighbour(trial: Trial) -> None:
    """Other tests may have left children of another kind to the process that runs them."""
    parent = os.getppid()
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    workers = [
        child
        for child in children
        if b"sightline.testing.conformance.worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    trial.require(workers == [str(os.getpid())], f"expected no process beside this one, got {len(workers)} in all")


def _has_one_thread(trial: Trial) -> None:
    got = (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
    trial.require(got == (1, "1"), f"expected one thread, got {got}")


BUILDING = (
    Check("ground", "there is ground", _fails_in_half),
    Check("house", "a house stands", _raises_in_half, ("ground",)),
    Check("roof", "it does not rain in", _passes, ("house",)),
    Check("sky", "there is a sky", _passes, ("ground",), excused=_no_sky),
    Check("room", "there is room", _passes, alone=True),
    Check("bricks", "all are there", _counts_bricks, num_shares=3),
    Check("cracks", "there is none", _finds_a_crack_in_half, num_shares=2),
    Check("sound", "it is heard", _speaks),
)
SHY = (
    *(Check(f"crowd-{number}", "there are others", _takes_a_while) for number in range(2)),
    Check("hermit", "nobody else is there", _has_no_neighbour, alone=True),
)
DEADLY = (
    Check("ground", "there is ground", _needs_a_whole_process),
    Check("threads", "there is one", _has_one_thread, ("ground",)),
    Check("cliff", "one does not fall", _exits, ("threads",)),
    Check("child", "nothing is left behind", _forks_and_exits, ("cliff",)),
    Check("storm", "one is not struck", _is_killed, ("child",)),
    Check("china", "nothing breaks", _breaks_its_process, ("storm",)),
)
