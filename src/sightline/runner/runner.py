"""The forward pass, eager or replayed. It runs only with a plan whose certificate matches the current state."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from sightline.attention.lanes import Depth
from sightline.attention.planner import PlannedBatch, Planner
from sightline.attention.workspace import Lane
from sightline.core.batch_memory import BatchMemory
from sightline.core.errors import UnplannedBatchError
from sightline.layers.scratch import Activations
from sightline.models.contract import Model
from sightline.runner.recording import Recorder, Recording


class Runner:
    """Runs planned batches through one model."""

    def __init__(self, model: Model, planner: Planner, activations: Mapping[Lane, Activations]) -> None:
        """`activations` has an entry for every lane of the planner: steps of two lanes may run at once."""
        self._model = model
        self._planner = planner
        self._activations = activations
        self._recordings: dict[BatchMemory, Recording] = {}
        self.num_replayed = 0
        """Steps that were replayed."""
        for memory in activations.values():
            model.reserve(memory.shaped(memory.max_tokens))

    def forward(self, planned: PlannedBatch) -> Tensor:
        """Returns logits [num_logits, vocab_size] fp32, or the states of a model without an output projection.

        The result is the caller's own, also if the step was replayed. Every call checks the certificate. Once it
        returns, later steps may read what it wrote to the cache. If it raises, its cache writes do not count. Raises
        `LaneBusyError` if another thread plans or runs in the plan's lane.
        """
        _require_plan(planned)
        return self._planner.lanes.run(planned.plan.certificate.lane, Depth.RUNNER, self._forward, planned)

    def capture(self, planned: PlannedBatch, recorder: Recorder) -> None:
        """Records the step. Later batches in the same memory are replayed.

        The step must be planned: a plan that is made while the work is recorded raises `LaneBusyError`.
        """
        _require_plan(planned)
        self._planner.lanes.run(planned.plan.certificate.lane, Depth.RUNNER, self._capture, planned, recorder)

    def _capture(self, planned: PlannedBatch, recorder: Recorder) -> None:
        current = self._planner.ensure(planned)
        lane = current.plan.certificate.lane
        work = partial(self._run, current, self._activations[lane])
        with current.in_stream_order():
            recording = self._planner.lanes.run(lane, Depth.RUNNING, recorder.record, work)
        self._planner.pin(current)
        self._recordings[current.batch.memory] = recording

    def _forward(self, planned: PlannedBatch) -> Tensor:
        current = self._planner.ensure(planned)
        lane = current.plan.certificate.lane
        recording = self._recordings.get(current.batch.memory)
        try:
            self._planner.launch(current)
            with current.in_stream_order():
                if recording is not None:
                    return self._planner.lanes.run(lane, Depth.RUNNING, self._replay, recording, current)
                return self._planner.lanes.run(lane, Depth.RUNNING, self._run, current, self._activations[lane])
        except BaseException:
            self._planner.take_back(current)
            raise

    def _run(self, current: PlannedBatch, memory: Activations) -> Tensor:
        # Without autocast: a caller's would round the products, and change tokens without a word.
        with torch.inference_mode(), torch.autocast(current.batch.device.type, enabled=False):
            current.prepare()
            return self._model.forward(current, memory.shaped(current.batch.num_tokens))

    def _replay(self, recording: Recording, current: PlannedBatch) -> Tensor:
        self.num_replayed += 1
        with torch.inference_mode():
            # A copy: the next step may be replayed before this one's logits are read.
            return recording.replay()[: len(current.batch.logit_places)].clone()


def _require_plan(planned: PlannedBatch) -> None:
    """Raises `UnplannedBatchError` for callers that no type checker sees."""
    if not isinstance(planned, PlannedBatch):
        raise UnplannedBatchError(
            f"expected a PlannedBatch, got {type(planned).__name__}; give it to Planner.ensure first"
        )
