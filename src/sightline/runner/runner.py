"""The forward pass. It runs only with a plan whose certificate matches the current state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sightline.attention.lanes import Depth
from sightline.attention.planner import PlannedBatch, Planner
from sightline.attention.workspace import Lane
from sightline.core.errors import UnplannedBatchError
from sightline.layers.scratch import Activations
from sightline.models.contract import Model


class Runner:
    """Runs planned batches through one model."""

    def __init__(self, model: Model, planner: Planner, activations: Mapping[Lane, Activations]) -> None:
        """`activations` has an entry for every lane of the planner: steps of two lanes may run at once."""
        self._model = model
        self._planner = planner
        self._activations = activations
        for memory in activations.values():
            model.reserve(memory.shaped(memory.max_tokens))

    def forward(self, planned: PlannedBatch) -> Tensor:
        """Returns logits [num_logits, vocab_size] fp32, or the states of a model without an output projection.

        Every call checks the certificate. Once it returns, later steps may read what it wrote to the cache. If it
        raises, its cache writes do not count. Raises `LaneBusyError` if another thread plans or runs in the plan's
        lane.
        """
        if not isinstance(planned, PlannedBatch):
            raise UnplannedBatchError(
                f"expected a PlannedBatch, got {type(planned).__name__}; give it to Planner.ensure first"
            )
        return self._planner.lanes.run(planned.plan.certificate.lane, Depth.RUNNER, self._forward, planned)

    def _forward(self, planned: PlannedBatch) -> Tensor:
        current = self._planner.ensure(planned)
        lane = current.plan.certificate.lane
        try:
            self._planner.launch(current)
            return self._planner.lanes.run(lane, Depth.RUNNING, self._run, current, self._activations[lane])
        except BaseException:
            self._planner.take_back(current)
            raise

    def _run(self, current: PlannedBatch, memory: Activations) -> Tensor:
        with torch.inference_mode():
            current.prepare()
            return self._model.forward(current, memory.shaped(current.batch.num_tokens))
