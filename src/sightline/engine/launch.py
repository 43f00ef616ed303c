"""One step on the device: assembled, planned, run, its tokens chosen; nothing is waited for.

A step that raises is cut in two and run again, until the rows that raise stand alone: nothing was committed, and a
row's entries come out the same, so that the others are as if they had never met. Knows rows and what they sample; does
not know the queue, and ends no request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from sightline.core.batch import Batch, RowWork
from sightline.core.device import device_faults
from sightline.core.errors import BatchError, DeviceFaultError
from sightline.engine.live import LiveSequence
from sightline.runner.batching import assemble
from sightline.runner.build import Runtime
from sightline.runner.sampling.logprobs import TokenLogprobs, token_logprobs
from sightline.runner.sampling.sampler import Chosen, RowSampling, choose
from sightline.scheduler.sequence import ScheduledRow, SequenceState

logger = logging.getLogger("sightline")


class Member(NamedTuple):
    """A row of a step and the sequence's life."""

    row: ScheduledRow
    live: LiveSequence


class SampledTokens(NamedTuple):
    """What was chosen, read."""

    tokens: list[int]
    finite: list[bool]
    """False where the row's logits held a NaN or an infinity: its token means nothing."""


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step that is under way, and what will come of it."""

    members: tuple[Member, ...]
    logits: Tensor
    """[num_logits, vocab_size] fp32, of all rows that want some, in order."""
    places: Mapping[SequenceState, int]
    """Of the sequences whose next token is chosen: which of the chosen ones it is."""
    chosen_logits: Tensor
    """[num_chosen, vocab_size] fp32."""
    sampling: tuple[RowSampling, ...]
    """By place, as `chosen`."""
    chosen: Chosen
    """On the device: the next step can go on from it."""

    @property
    def rows(self) -> tuple[ScheduledRow, ...]:
        return tuple([member.row for member in self.members])

    def read(self) -> SampledTokens:
        """Waits for the device."""
        return SampledTokens(self.chosen.tokens.tolist(), self.chosen.finite.tolist())

    def logprobs(self, place: int, token: int) -> TokenLogprobs | None:
        """Of a chosen token, where its row asked for them: of the raw logits."""
        num_best = self.sampling[place].params.logprobs
        if num_best is None:
            return None
        [entry] = token_logprobs(self.chosen_logits[place : place + 1], [token], [num_best])
        return entry


class RowFailure(NamedTuple):
    """A row that raises, alone."""

    member: Member
    error: Exception


class Launch(NamedTuple):
    """What came of a schedule: one step, or the parts that it was cut into, and rows that cannot run."""

    steps: tuple[LaunchedStep, ...]
    failures: tuple[RowFailure, ...]


class Launcher:
    """Puts steps on a runtime's device."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.num_cut = 0
        """Steps that raised and were run again in parts."""

    def launch(self, members: Sequence[Member], in_flight: Sequence[LaunchedStep]) -> Launch:
        """Rows may continue tokens that steps in flight choose. Raises `DeviceFaultError`; all else is a failure."""
        try:
            return Launch((self._run(members, in_flight),), ())
        except DeviceFaultError:
            raise
        except Exception as error:
            logger.warning("a step of %d rows raised and is run again in parts: %r", len(members), error)
            self.num_cut += 1
        return self._launch_parts(members, in_flight)

    def _launch_parts(self, members: Sequence[Member], in_flight: Sequence[LaunchedStep]) -> Launch:
        """Each half on its own. A single row is tried once more: what raised may have been the moment."""
        middle = len(members) // 2
        launches = []
        for part in (members[:middle], members[middle:]) if middle else (members,):
            try:
                launches.append(Launch((self._run(part, in_flight),), ()))
            except DeviceFaultError:
                raise
            except Exception as error:
                alone = len(part) == 1
                launches.append(
                    Launch((), (RowFailure(part[0], error),)) if alone else self._launch_parts(part, in_flight)
                )
        return Launch(
            tuple(step for launch in launches for step in launch.steps),
            tuple(failure for launch in launches for failure in launch.failures),
        )

    def _run(self, members: Sequence[Member], in_flight: Sequence[LaunchedStep]) -> LaunchedStep:
        with device_faults():
            batch = assemble([row_work(row) for row, _ in members], self._runtime.store)
            planned = self._runtime.planner.plan(_filled(batch, members, in_flight))
            try:
                return _chosen(members, self._runtime.runner.forward(planned))
            except BaseException:
                self._runtime.planner.take_back(planned)
                raise


def _chosen(members: Sequence[Member], logits: Tensor) -> LaunchedStep:
    """The step under way, with the next token of each row that completes chosen."""
    ends = accumulate([row.num_logits for row, _ in members])
    completing = [(row, live, end) for (row, live), end in zip(members, ends, strict=True) if row.completes]
    chosen_logits = logits
    if len(completing) < logits.shape[0]:
        chosen_logits = logits[[end - 1 for _, _, end in completing]]
    sampling = tuple([live.sampling(row) for row, live, _ in completing])
    chosen = choose(chosen_logits, sampling)
    places = {row.sequence: place for place, (row, _, _) in enumerate(completing)}
    return LaunchedStep(tuple(members), logits, places, chosen_logits, sampling, chosen)


def _filled(batch: Batch, members: Sequence[Member], in_flight: Sequence[LaunchedStep]) -> Batch:
    """The batch with the tokens that steps in flight choose, where it continues them; the host never sees them."""
    if not batch.pending:
        return batch
    ends = accumulate([row.num_tokens for row, _ in members])
    unread = {row.sequence: end - 1 for (row, _), end in zip(members, ends, strict=True) if end - 1 in batch.pending}
    # The last step in flight that chose for a sequence chose what comes next.
    for step in reversed(in_flight):
        found = [(unread.pop(sequence), step.places[sequence]) for sequence in tuple(unread) if sequence in step.places]
        if found:
            places, sources = zip(*found, strict=True)
            tokens = step.chosen.tokens.index_select(0, torch.tensor(sources, device=batch.device))
            batch = batch.filled(places, tokens)
    return batch


def row_work(row: ScheduledRow) -> RowWork:
    """What a scheduled row computes. A token that is on its way is pending."""
    if row.sequence.table_row != row.table_row:
        raise BatchError("rows", None, f"{row.sequence.table_row}, which its sequence holds", row.table_row)
    context_len, num_tokens = row.context_len, row.num_tokens
    tokens = row.sequence.tokens[context_len : context_len + num_tokens]
    return RowWork(row.table_row, tokens, context_len, row.num_logits, num_pending=num_tokens - len(tokens))
