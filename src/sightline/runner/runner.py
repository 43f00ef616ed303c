"""The forward pass: nothing runs without a plan that is proven current."""

from __future__ import annotations

import torch
from torch import Tensor

from sightline.attention.planner import PlannedBatch, Planner
from sightline.core.errors import UnplannedBatchError
from sightline.layers.scratch import Activations
from sightline.models.contract import Model


class Runner:
    """Runs planned batches through one model."""

    def __init__(self, model: Model, planner: Planner, activations: Activations) -> None:
        self._model = model
        self._planner = planner
        self._activations = activations
        model.reserve(activations.shaped(activations.max_tokens))

    def forward(self, planned: PlannedBatch) -> Tensor:
        """Logits [num_logits, vocab_size] fp32. The certificate is checked here, at every call."""
        if not isinstance(planned, PlannedBatch):
            raise UnplannedBatchError(
                f"expected a PlannedBatch, got {type(planned).__name__}; give it to Planner.ensure first"
            )
        current = self._planner.ensure(planned)
        with torch.inference_mode():
            current.prepare()
            return self._model.forward(current, self._activations.shaped(current.batch.num_tokens))
