"""Every error that Sightline raises on purpose.

    SightlineError
    ├── ConfigError              a setting, or a combination of settings, cannot work
    │   ├── NoBackendError       no attention backend can serve a layer group; lists every candidate's reasons
    │   └── ModelTooLargeError   the device's memory does not hold the weights, or nothing beside them
    ├── ModelError               what is on disk cannot be run faithfully
    │   ├── CheckpointError      a file is truncated, inconsistent or hostile
    │   └── UnsupportedModelError  an architecture, or a config field that changes the result, is not supported
    ├── RequestError             one request is invalid; others are unaffected
    │   └── QueueFullError       as many requests wait as may; the same one can be sent again later
    ├── GrammarError             a running answer's grammar cannot go on; its sequence fails alone
    ├── PlanError                the plan contract was broken
    │   ├── BatchError           a batch says something that is not so; has .field, .row, .expected and .got
    │   ├── UnplannedBatchError  a forward was given something that carries no plan
    │   ├── StalePlanError       what a plan or its batch was made from has changed since
    │   ├── UncapturedPlanError  a plan does not fit the buffers that a captured graph reads; its step can run eagerly
    │   └── LaneBusyError        a second thread came into a lane while another was in it
    ├── OutOfPages               a pool has fewer free pages than asked for
    ├── DeviceFaultError         the device failed in a way that nothing on it survives
    │   └── RankLostError        another process that has a part of the model died, or does not answer
    └── EngineClosedError        work was given to an engine that has been shut down

A message says what was expected, what came, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class SightlineError(Exception):
    """Root of the tree: catch this to catch everything that Sightline raises on purpose."""


class ConfigError(SightlineError):
    """A setting, or a combination of settings, cannot work."""


class NoBackendError(ConfigError):
    """No attention backend can serve a layer group."""


class ModelTooLargeError(ConfigError):
    """The device's memory does not hold the weights, or nothing beside them."""


class ModelError(SightlineError):
    """A model's files cannot be run faithfully."""


class CheckpointError(ModelError):
    """A file is truncated, inconsistent or hostile."""


class UnsupportedModelError(ModelError):
    """An architecture, or a config field that changes the result, is not supported."""


class RequestError(SightlineError):
    """One request is invalid; others are unaffected."""


class QueueFullError(RequestError):
    """The queue is full. The same request can be sent again later."""


class GrammarError(SightlineError):
    """The grammar of a running answer cannot go on. Its sequence fails, and no other."""


class PlanError(SightlineError):
    """The plan contract was broken by the caller."""


class BatchError(PlanError, ValueError):
    """A batch contradicts itself or what the cache holds for its rows."""

    def __init__(self, field: str, row: int | None, expected: object, got: object, remedy: str = "") -> None:
        """`row` is the index in the batch, None if the error is about the whole batch."""
        self.field = field
        self.row = row
        self.expected = expected
        self.got = got
        where = "" if row is None else f" of row {row}"
        super().__init__(f"expected {field}{where} to be {expected}, got {got}{f'; {remedy}' if remedy else ''}")


class UnplannedBatchError(PlanError, TypeError):
    """A forward was given something that carries no plan."""


class StalePlanError(PlanError):
    """A plan is out of date: something that it or its batch was made from has changed."""

    def __init__(self, changes: Sequence[str], remedy: str) -> None:
        self.changes = tuple(changes)
        super().__init__(f"the plan is stale: {'; '.join(self.changes)}. {remedy}")


class UncapturedPlanError(PlanError):
    """A plan does not fit the buffers that a captured graph reads. The same step can run eagerly."""


class LaneBusyError(PlanError):
    """A second thread came into a lane while another was in it. Nothing was done for the second one."""


class OutOfPages(SightlineError):  # noqa: N818 - the name is the condition, as in MemoryError's kin
    """A pool has fewer free pages than asked for."""


class DeviceFaultError(SightlineError):
    """The device failed in a way that nothing on it survives."""


class RankLostError(DeviceFaultError):
    """Another process that has a part of the model died, or does not answer: nothing that they compute can go on."""


class EngineClosedError(SightlineError):
    """Work was given to an engine that has been shut down."""
