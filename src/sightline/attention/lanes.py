"""Keeps a second thread out of a lane while the first one is in it.

A lane's scratch memory and plan buffers serve one step at a time. Two threads in one lane would overwrite each other's
plans and activations, and both would get wrong answers without an error. Here the second thread gets `LaneBusyError`.
Between two calls a lane is free, so that one thread may build an engine and another may step it.

Does not know what runs in a lane.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum
from typing import TypeAlias, TypeVar, TypeVarTuple

from sightline.attention.workspace import Lane
from sightline.core.errors import LaneBusyError
from sightline.core.turns import is_gone

_ArgsT = TypeVarTuple("_ArgsT")
_T = TypeVar("_T")


class Depth(IntEnum):
    """How deep in a step a call is. A call in a lane may only lead to deeper ones."""

    ENGINE = 0
    RUNNER = 1
    PLANNER = 2
    RUNNING = 3
    """The model is running: nothing else may use the lane, not even the same thread."""


_Claim: TypeAlias = tuple[threading.Thread, Depth]
"""The thread in a lane, and its depth. A new tuple per call, whose identity tells calls apart."""


class _Here(threading.local):
    """Each thread's own `Thread`. Reading it is faster than `threading.current_thread()`."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()


class LaneGuard:
    """Lets one thread at a time into each lane. That thread may enter again only at a greater depth.

    A signal handler or a callback runs in the middle of a step: a step started there would overwrite the outer step's
    memory. Takes no lock unless two threads collide: `dict.setdefault` is atomic.
    """

    def __init__(self) -> None:
        self._here = _Here()
        self._claims: dict[Lane, _Claim] = {}
        self._taking_over = threading.Lock()

    def run(self, lane: Lane, depth: Depth, function: Callable[[*_ArgsT], _T], *args: *_ArgsT) -> _T:
        """Calls `function` in the lane. Raises `LaneBusyError` without calling it if another thread is in the lane, or
        if this thread already is at the same or a greater depth."""
        claims = self._claims
        claim = (self._here.thread, depth)
        held = claim
        try:
            held = claims.setdefault(lane, claim)
            if held is not claim:
                if held[0] is claim[0] and held[1] < depth:
                    claims[lane] = claim
                else:
                    self._take_over(lane, held, claim)
                    held = claim
            return function(*args)
        finally:
            # No call in these lines: Python handles signals at calls, so Ctrl-C cannot leave the lane taken.
            if lane in claims and claims[lane] is claim:
                if held is claim:
                    del claims[lane]
                else:
                    claims[lane] = held

    def _take_over(self, lane: Lane, held: _Claim, claim: _Claim) -> None:
        """Takes the lane if the thread holding it is dead, as all other threads are in a forked process."""
        with self._taking_over:
            if is_gone(held[0]) and self._claims.get(lane) is held:
                self._claims[lane] = claim
                return
        if held[0] is claim[0]:
            raise LaneBusyError(
                f"expected no call in lane {lane} from within a step, got one from a signal handler or a callback of "
                f"{claim[0].name}; do it when the call has returned, or cancel the request"
            )
        raise LaneBusyError(
            f"expected one thread at a time in lane {lane}, got {claim[0].name} while {held[0].name} is in it; let "
            "one thread do all of it, build an engine for each thread, or use LLM, whose calls wait for each other"
        )
