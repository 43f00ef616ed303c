"""Parts that a layer lacks. They take their inputs and give nothing, so no caller asks whether a part is there."""

from __future__ import annotations

from dataclasses import dataclass

from sightline.attention.planner import PlannedBatch
from sightline.layers.rotary import RotaryTable
from sightline.layers.scratch import Scratch
from sightline.layers.sink import Sink
from sightline.layers.source import Source


@dataclass(frozen=True)
class AbsentAttention:
    """The token mixer of a layer that is only a feed-forward."""

    turns = True
    """Any memory order suits it."""

    def buffers(self, scratch: Scratch) -> None:
        """Takes none."""

    def __call__(
        self, source: Source, sink: Sink, planned: PlannedBatch, rotary: RotaryTable | None, scratch: Scratch
    ) -> None:
        """Leaves the sink as it is."""


@dataclass(frozen=True)
class AbsentMlp:
    """The feed-forward of a layer that only mixes tokens."""

    def buffers(self, scratch: Scratch) -> None:
        """Takes none."""

    def __call__(self, source: Source, sink: Sink, scratch: Scratch) -> None:
        """Leaves the sink as it is."""
