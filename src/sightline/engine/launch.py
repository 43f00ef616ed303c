"""One step on the device: assembled, planned, run, and its outputs consumed; nothing is waited for.

A step that raises is cut in two and run again, until the rows that raise are alone. Nothing was committed, and a row's
entries do not depend on its neighbours, so the other rows come out the same. Knows rows and what consumes their
outputs; does not know the queue, and ends no request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from sightline.attention.planner import PlannedBatch
from sightline.core.batch import PADDING_ROW, Batch, RowMask, StepWork
from sightline.core.device import device_faults
from sightline.core.errors import BatchError, DeviceFaultError, UncapturedPlanError
from sightline.core.ledger import Ledger
from sightline.core.metrics import PhaseTimes, StepPhase
from sightline.core.request import FinishReason
from sightline.runner.halves import first_half
from sightline.runner.replicas import Beside, agreed_size
from sightline.runner.runtime import Runtime
from sightline.scheduler.sequence import RowResult, ScheduledRow, SequenceState
from sightline.speculative.verification import tree_mask, tree_positions

logger = logging.getLogger("sightline")


class Life(Protocol):
    """A sequence in the step loop, and what becomes of its results."""

    sequence: SequenceState
    error: str | None
    finish_reason: FinishReason | None

    def take_in(self) -> FinishReason | None:
        """Reads the results committed since the last call. Returns why the sequence ends, or None if it goes on."""

    def finish(self, reason: FinishReason) -> None:
        """Ends it, after its last result."""

    def break_off(self, error: str) -> None:
        """Ends it as it stands."""


LifeT = TypeVar("LifeT", bound=Life)


class StepResults(Protocol):
    """What a step gave its rows, on the host."""

    def take(self, index: int) -> RowResult:
        """Gives a row's life its results and returns what to commit; sets the life's `error` if the row failed.

        Taking a row again changes nothing.
        """


class Outcome(Protocol):
    """What a step in flight will give its rows, on the device."""

    @property
    def places(self) -> Mapping[SequenceState, int]:
        """Sequences whose next token this step chooses, and its index in `next_tokens`."""

    @property
    def next_tokens(self) -> Tensor:
        """[num_chosen] int64: the next step can continue them before the host has read them."""

    def results(self) -> StepResults:
        """Waits for the device."""


Consume: TypeAlias = Callable[[Sequence[ScheduledRow], Sequence[LifeT], Tensor, Tensor], Outcome]
"""What a step is for: from its rows, their lives, the tokens that it computed [num_tokens] and the model's outputs
[num_logits, width] to an outcome."""


@dataclass(frozen=True, eq=False)
class LaunchedStep(Generic[LifeT]):
    """A step in flight."""

    rows: tuple[ScheduledRow, ...]
    lives: tuple[LifeT, ...]
    """[num_rows]."""
    outcome: Outcome
    started_at: float
    """When its launch began, in the loop's clock time."""
    states: Tensor | None = None
    """[num_tokens, width]: what the model gave beside its outputs, for a drafter."""

    def results(self) -> StepResults:
        """What it gave its rows. If that cannot be read, every row of the step fails, and no other."""
        try:
            return self.outcome.results()
        except (DeviceFaultError, torch.AcceleratorError):
            raise
        except Exception as error:
            return _Unreadable(error)


class _Unreadable(NamedTuple):
    """Results of a step whose outcome could not be read."""

    error: Exception

    def take(self, index: int) -> RowResult:
        del index
        raise self.error


class RowFailure(NamedTuple, Generic[LifeT]):
    """A row that raises, alone."""

    live: LifeT
    error: Exception


class Launch(NamedTuple, Generic[LifeT]):
    """The result of launching a schedule: one step, or the parts that it was cut into, and rows that cannot run."""

    steps: tuple[LaunchedStep[LifeT], ...]
    failures: tuple[RowFailure[LifeT], ...]


class StepLauncher(Generic[LifeT]):
    """Puts steps on a runtime's device."""

    def __init__(
        self, runtime: Runtime, consume: Consume[LifeT], mask: RowMask, clock: Callable[[], float], ledger: Ledger
    ) -> None:
        """`mask` is every row's; `clock` tells seconds."""
        self._runtime = runtime
        self._ledger = ledger
        self._clock = clock
        self._consume = consume
        self._mask = mask
        self.num_cut = 0
        """Steps that raised and were run again in parts."""
        self.num_uncaptured = 0
        """Steps that ran eagerly because their plan did not fit what their graph reads."""
        self.phases = PhaseTimes()

    def launch(
        self, rows: Sequence[ScheduledRow], lives: Sequence[LifeT], in_flight: Sequence[LaunchedStep[LifeT]]
    ) -> Launch[LifeT]:
        """Rows may continue tokens that steps in flight choose. Raises `DeviceFaultError`; all else is a failure."""
        try:
            return Launch((self._run(rows, lives, in_flight),), ())
        except DeviceFaultError:
            raise
        except Exception as error:
            logger.warning("a step of %d rows raised and is run again in parts: %r", len(rows), error)
            self.num_cut += 1
        return self._launch_parts(rows, lives, in_flight)

    def _launch_parts(
        self, rows: Sequence[ScheduledRow], lives: Sequence[LifeT], in_flight: Sequence[LaunchedStep[LifeT]]
    ) -> Launch[LifeT]:
        """Runs each half on its own. Retries a single row once: the error may be transient."""
        middle = len(rows) // 2
        steps: list[LaunchedStep[LifeT]] = []
        failures: list[RowFailure[LifeT]] = []
        for part in (slice(middle), slice(middle, None)) if middle else (slice(None),):
            try:
                steps.append(self._run(rows[part], lives[part], in_flight))
            except DeviceFaultError:
                raise
            except Exception as error:
                if len(rows[part]) == 1:
                    failures.append(RowFailure(lives[part][0], error))
                    continue
                launch = self._launch_parts(rows[part], lives[part], in_flight)
                steps += launch.steps
                failures += launch.failures
        return Launch(tuple(steps), tuple(failures))

    def _run(
        self, rows: Sequence[ScheduledRow], lives: Sequence[LifeT], in_flight: Sequence[LaunchedStep[LifeT]]
    ) -> LaunchedStep[LifeT]:
        runtime, phases, started_at = self._runtime, self.phases, self._clock()
        with device_faults():
            batch, beside = self._assemble(rows, unread_tokens(in_flight))
            phases.end(StepPhase.ASSEMBLE)
            planned = self._plan(batch)
            phases.end(StepPhase.PLAN)
            try:
                outputs = self._forward(batch, planned, beside)
                states = None
                if runtime.runner.gives_states:
                    states = _joined([runtime.runner.states(each) for each in planned])
                phases.end(StepPhase.FORWARD)
                outcome = self._consume(rows, lives, _tokens(batch, beside), outputs)
                phases.end(StepPhase.SAMPLE)
                return LaunchedStep(tuple(rows), tuple(lives), outcome, started_at, states)
            except BaseException:
                runtime.take_back(planned, beside)
                raise

    def _assemble(self, rows: Sequence[ScheduledRow], unread: UnreadTokens) -> tuple[Batch, Sequence[Beside]]:
        """The batch of this replica, and those of the others. The rows are in the order of replicas."""
        runtime, graphs = self._runtime, self._runtime.graphs
        # A schedule has rows of one kind.
        if rows[0].sequence.is_whole:
            return Batch(rows_work(rows, self._mask, unread.places), (), runtime.store.device), ()
        if not runtime.others:
            return graphs.assemble(rows_work(rows, self._mask, unread.places), unread.tokens), ()
        works = [
            rows_work([row for row in rows if row.sequence.replica == replica], self._mask, unread.places)
            for replica in range(1 + len(runtime.others))
        ]
        size = agreed_size(works) if runtime.definition.exchanges_rows else None
        beside = [
            graphs.assemble_beside(work, store.main, unread.tokens, size)
            for work, store in zip(works[1:], runtime.others, strict=True)
        ]
        return graphs.assemble(works[0], unread.tokens, size=size), beside

    def _forward(self, batch: Batch, planned: Sequence[PlannedBatch], beside: Sequence[Beside]) -> Tensor:
        """The outputs of the step, or of its halves, in order; then those of other replicas."""
        runner = self._runtime.runner
        match planned:
            case []:
                return runner.forward_elsewhere(batch, beside, self._runtime.definition.vocab_size)
            case [whole] if beside:
                return runner.forward(whole, beside=beside)
            case [whole]:
                return runner.forward(whole)
            case [first, second]:
                return runner.forward_halves(batch, (first, second))
            case _:
                raise ValueError(f"expected a step, or one cut in two, got {len(planned)} parts")

    def _plan(self, batch: Batch) -> tuple[PlannedBatch, ...]:
        """The planned batch; the same one in memory of its own if its graph cannot serve the plan; or its halves; or
        nothing if it is empty, as other replicas alone have rows."""
        planner = self._runtime.planner
        if not batch.num_tokens:
            return ()
        first_rows = first_half(batch) if self._runtime.config.enable_two_batch_overlap else 0
        if first_rows:
            return self._runtime.plan_halves(batch, first_rows)
        try:
            return (planner.plan(batch),)
        except UncapturedPlanError as error:
            logger.debug("a step of %d rows runs eagerly: %s", batch.num_rows, error)
        self._ledger.degrade(
            "cuda_graph_sizes",
            f"some steps in the graph of {batch.num_rows} rows run eagerly: a plan needs other buffers than the graph "
            "was captured with",
            "choose another attention backend: this one must take the same buffers in every plan of such a step, or "
            "declare no graph level",
        )
        self.num_uncaptured += 1
        eager = replace(batch)
        if self._runtime.definition.exchanges_rows:
            eager = eager.pad(batch.num_rows, batch.num_tokens)
        return (planner.plan(eager),)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts one after another; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _tokens(batch: Batch, beside: Sequence[Beside]) -> Tensor:
    """The tokens of all replicas' rows, without padding between them."""
    if not beside:
        return batch.tokens
    return torch.cat([each.tokens[: sum(each.work.query_lens)] for each in (batch, *(other.batch for other in beside))])


class UnreadTokens(NamedTuple):
    """The tokens that steps in flight choose, which the host has not read."""

    places: Mapping[SequenceState, int]
    """Sequences, and where the next token of each is in `tokens`."""
    tokens: Tensor | None
    """[num_tokens] int64 on the device; None if no step is in flight."""


def unread_tokens(in_flight: Sequence[LaunchedStep[LifeT]]) -> UnreadTokens:
    """The tokens of all steps in flight. The last step that chose for a sequence chose what comes next."""
    if not in_flight:
        return UnreadTokens({}, None)
    if len(in_flight) == 1:
        outcome = in_flight[0].outcome
        return UnreadTokens(outcome.places, outcome.next_tokens)
    places: dict[SequenceState, int] = {}
    tokens: list[Tensor] = []
    start = 0
    for step in in_flight:
        places.update((sequence, start + place) for sequence, place in step.outcome.places.items())
        tokens.append(step.outcome.next_tokens)
        start += len(tokens[-1])
    return UnreadTokens(places, torch.cat(tokens))


_NO_TOKENS: list[int] = []
"""Shared by all rows that only continue a token in flight. Nothing changes it."""


def rows_work(rows: Sequence[ScheduledRow], mask: RowMask, unread: Mapping[SequenceState, int]) -> StepWork:
    """What scheduled rows compute. The last token of a row may be one that a step in flight chooses."""
    table_rows, context_lens, num_logits = list[int](), list[int](), list[int]()
    tokens, places = list[Sequence[int]](), list[int | None]()
    masks, positions = [mask] * len(rows), list[Sequence[int] | None]([None]) * len(rows)
    num_candidates = [1 + len(row.drafts) for row in rows]
    for index, row in enumerate(rows):
        sequence, table_row, context_len, num_tokens = row.sequence, row.table_row, row.context_len, row.num_tokens
        held = PADDING_ROW if sequence.is_whole else sequence.table_row
        if held != table_row:
            raise BatchError("rows", None, f"{held}, which its sequence holds", table_row)
        table_rows.append(table_row)
        context_lens.append(context_len)
        # The same as `num_logits`; a call for each row of each step would take longer than all else here.
        num_logits.append(num_tokens if row.scores_prompt else 1 + len(row.drafts) if row.completes else 0)
        known = sequence.tokens
        num_missing = context_len + num_tokens - len(known)
        if row.parents is not None:
            masks[index], positions[index] = tree_mask(row), tree_positions(row)
        if row.drafts and num_missing == len(row.drafts):
            tokens.append([*known[context_len:], *row.drafts])
            places.append(None)
            continue
        if num_missing <= 0:
            tokens.append(known[context_len : context_len + num_tokens])
            places.append(None)
            continue
        # With two steps in flight the host lacks tokens before the row's, too.
        num_known = max(0, num_tokens - num_missing) if num_tokens > 1 else 0
        place = unread.get(sequence)
        if num_known + 1 < num_tokens or place is None:
            wanted = f"{num_tokens} from {context_len} on that are known or being chosen"
            raise BatchError("tokens", None, wanted, num_known)
        tokens.append(known[context_len:] if num_known else _NO_TOKENS)
        places.append(place)
    return StepWork(table_rows, tokens, context_lens, num_logits, masks, positions, places, num_candidates)
