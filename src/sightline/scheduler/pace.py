"""How long steps take, and how much a step may hold so that rows that generate do not wait longer than they may.

    seconds = decode.seconds + slope * (work - decode.work)

Work counts the tokens, logits and contexts of a step (`costs.py`). `decode` is a typical step in which every row has
one token, and the slope is what more work than that costs in steps with prompts. Both come from the last few steps of
their kind, by a quantile: one step that was slow or fast for another reason changes little, and a device that becomes
slower or faster is followed within a few steps. A step may cost at most twice what was seen before, because a slope
that was learned from small steps says little about large ones.

Knows rows and times. Does not know clocks, nor which rows run next.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeVar

from sightline.scheduler.costs import StepCosts, StepLimit
from sightline.scheduler.sequence import ScheduledRow

_WINDOW = 8
"""Steps of each kind that are remembered."""
_DISTANCE = 1.1
"""A slope is taken between two steps only if one has this many times the work of the other."""
_MOST_BASE = 0.75
"""The most of a typical step with prompts that counts as the time of a decode step."""


class _TimedStep(NamedTuple):
    seconds: float
    work: float


_NO_STEP = _TimedStep(0.0, 0.0)
_SampleT = TypeVar("_SampleT", float, _TimedStep)


class Pace:
    """The times of an engine's steps, and the limit that follows from them."""

    def __init__(self, costs: StepCosts, max_step_ms: float | None) -> None:
        """`max_step_ms` is the longest step with rows that generate; None and 0 are no limit."""
        self.costs = costs
        self.max_seconds = max_step_ms / 1e3 if max_step_ms else None
        """Infinite: steps are timed and not limited. None: neither."""
        self._decode = _NO_STEP
        self._slope = 0.0
        """Seconds per work beyond that of a decode step."""
        self.total_seconds = 0.0
        """Time of all steps."""
        self.num_over = 0
        """Steps that took longer than `max_seconds` while a row generated."""
        self._decodes: deque[_TimedStep] = deque(maxlen=_WINDOW)
        self._prompts: deque[_TimedStep] = deque(maxlen=_WINDOW)
        self._reach = 0.0
        """The most work of a step with prompts."""
        self._ended_at = -math.inf

    @property
    def max_step_ms(self) -> float | None:
        """The limit in milliseconds; None is no limit."""
        limit = self.max_seconds
        return None if limit is None or math.isinf(limit) else limit * 1e3

    @property
    def has_decoded(self) -> bool:
        """True once a step of one token for each row was timed."""
        return len(self._decodes) > 0

    @property
    def fastest_decode_seconds(self) -> float:
        """The shortest of the last steps of one token for each row: other work on the machine can only slow a step
        down."""
        return min(self._decodes).seconds

    def seconds(self, work: float) -> float:
        """How long a step is expected to take."""
        return self._decode.seconds + self._slope * (work - self._decode.work)

    def restart(self) -> None:
        """Forgets the steps so far, which say nothing about those to come."""
        self._decodes.clear()
        self._prompts.clear()
        self._reach, self._slope = 0.0, 0.0
        self._learn()

    def limit(self) -> StepLimit | None:
        """What a step may cost while rows generate; None is no limit."""
        if self.max_seconds is None or math.isinf(self.max_seconds):
            return None
        return StepLimit(min(self._affordable(self.max_seconds), 2.0 * self._reach), self.costs)

    def observe(self, rows: Sequence[ScheduledRow], started_at: float, ended_at: float) -> None:
        """Takes in the time of a step. One that began before the last one ended took the time since that end."""
        seconds = ended_at - max(started_at, self._ended_at)
        self._ended_at = ended_at
        self.total_seconds += seconds
        if self.max_seconds is None:
            return
        lengths = [row.num_tokens for row in rows]
        step = _TimedStep(seconds, self._work(rows))
        if seconds > self.max_seconds and 1 in lengths:
            self.num_over += 1
        if max(lengths) == 1:
            self._decodes.append(step)
        else:
            self._reach = max(self._reach, step.work)
            # A step that is small for this device and limit is mostly base, and says little about the slope.
            if not self._prompts or step.work >= min(self._affordable(self.max_seconds), self._reach) / 2.0:
                self._prompts.append(step)
        self._learn()

    def _work(self, rows: Sequence[ScheduledRow]) -> float:
        """The work of the replica that has most: they compute at the same time, and each is limited on its own."""
        found = defaultdict[int, float](float)
        for row in rows:
            found[row.sequence.replica] += self.costs.work(row.num_tokens, row.context_len, row.num_logits)
        return max(found.values())

    def _affordable(self, seconds: float) -> float:
        """The work of a step that takes so long; none before the first step with prompts."""
        if not self._prompts:
            return 0.0
        if self._slope <= 0.0:
            return math.inf
        return max(0.0, self._decode.work + (seconds - self._decode.seconds) / self._slope)

    def _learn(self) -> None:
        decode = _typical(self._decodes) if self._decodes else _NO_STEP
        larger = [step for step in self._prompts if step.work > _DISTANCE * decode.work]
        if self._prompts and not larger:
            # Prompts that are no larger than decode steps are charged with all of their time.
            decode, larger = _NO_STEP, list(self._prompts)
        if larger:
            # Decode steps may lie long back: if the device was slower then, prompts must not seem to cost nothing.
            decode = decode._replace(seconds=min(decode.seconds, _MOST_BASE * _typical(larger).seconds))
            self._slope = _typical([(step.seconds - decode.seconds) / (step.work - decode.work) for step in larger])
        self._decode = decode


def _typical(samples: Collection[_SampleT]) -> _SampleT:
    """The third quartile, because most steps shall take less; never the largest of several."""
    return sorted(samples)[3 * (len(samples) - 1) // 4]
