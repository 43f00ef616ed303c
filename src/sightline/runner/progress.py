"""The phases in which a runtime is built, what a watcher is told of them, and how long each took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias


class BuildPhase(Enum):
    """What is done before an engine is ready, in order."""

    WEIGHTS = "reading weights"
    KERNELS = "compiling kernels"
    GRAPHS = "recording decode steps"
    REQUESTS = "trying requests"


@dataclass(frozen=True)
class BuildStep:
    """What is under way."""

    phase: BuildPhase
    what: str
    """What is read, compiled, captured or tried, in words; empty at the end of the phase."""
    done: int
    total: int

    @property
    def title(self) -> str:
        named = f": {self.what}" if self.what else ""
        return f"{self.phase.value}{named}"

    def __str__(self) -> str:
        return f"{self.title} ({self.done} of {self.total})"


OnBuildStep: TypeAlias = Callable[[BuildStep], None]


def ignore(step: BuildStep) -> None:
    """Nobody watches."""
    del step


@dataclass(frozen=True)
class BuildTimes:
    """How long each phase took."""

    seconds: dict[BuildPhase, float] = field(default_factory=dict)

    @contextmanager
    def measured(self, phase: BuildPhase) -> Iterator[None]:
        """Counts the time of the block as the phase's."""
        start = time.monotonic()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - start

    def lines(self) -> list[str]:
        """A line for each phase, for a person."""
        return [f"{phase.value}: {seconds:.1f} s" for phase, seconds in self.seconds.items()]
