"""The forward pass, eager or replayed. It runs only with a plan whose certificate matches the current state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from sightline.attention.lanes import Depth
from sightline.attention.planner import PlannedBatch, Planner
from sightline.attention.workspace import MAIN_LANE, Lane
from sightline.core.batch import Batch, BatchId
from sightline.core.batch_memory import BatchMemory
from sightline.core.errors import BatchError, PlanError, UnplannedBatchError
from sightline.distributed.collectives import NO_LINKS, Links
from sightline.layers.scratch import Activations
from sightline.models.contract import GivenStates, MadeStates, Model
from sightline.runner.halves import SecondThread
from sightline.runner.recording import Recorder, Recording
from sightline.runner.replicas import Beside
from sightline.runner.roles import NOBODY, Companions


class Runner:
    """Runs planned batches through one model."""

    def __init__(
        self,
        model: Model,
        planner: Planner,
        activations: Mapping[Lane, Activations],
        companions: Companions = NOBODY,
        links: Links = NO_LINKS,
    ) -> None:
        """`activations` has an entry for every lane of the planner: steps of two lanes may run at once. `companions`
        run every step too; `links` are those that layers use."""
        self._companions = companions
        self._links = links
        device = next(iter(activations.values())).device
        self._second = SecondThread(device) if len(activations) > 1 else None
        self._model = model
        self._planner = planner
        self._activations = activations
        self._recordings: dict[BatchMemory, Recording] = {}
        self.num_replayed = 0
        """Steps that were replayed."""
        self.num_halved = 0
        """Steps that were cut in two."""
        self._states_of: dict[Lane, BatchId] = {}
        """The batch whose states the last forward in each lane left behind."""
        for memory in activations.values():
            scratch = memory.shaped(memory.max_tokens)
            model.reserve(scratch)
            for kind, width in ((GivenStates, model.states_in), (MadeStates, model.states_out)):
                if width:
                    scratch.of(kind, width)

    def forward(self, planned: PlannedBatch, states: Tensor | None = None, beside: Sequence[Beside] = ()) -> Tensor:
        """Returns logits [num_logits, vocab_size] fp32, or the states of a model without an output projection.

        `beside` are the steps of other replicas, whose logits follow; without it they run padding.

        `states` [num_tokens, width] are those that the model takes, without padding; None if it takes none.

        The result is the caller's own, also if the step was replayed. Every call checks the certificate. Once it
        returns, later steps may read what it wrote to the cache. If it raises, its cache writes do not count. Raises
        `LaneBusyError` if another thread plans or runs in the plan's lane.
        """
        _require_plan(planned)
        lane = planned.plan.certificate.lane
        return self._planner.lanes.run(lane, Depth.RUNNER, self._forward, planned, states, beside)

    def forward_elsewhere(self, idle: Batch, beside: Sequence[Beside], width: int) -> Tensor:
        """Runs a step in which only other replicas have rows. Returns their logits [num_logits, width]."""
        return self._planner.lanes.run(MAIN_LANE, Depth.RUNNER, self._forward_elsewhere, idle, beside, width)

    def _forward_elsewhere(self, idle: Batch, beside: Sequence[Beside], width: int) -> Tensor:
        with self._companions.along(idle, beside) as join:
            return join(torch.empty((0, width), device=idle.device))

    @property
    def gives_states(self) -> bool:
        """True if the model gives a state for each token."""
        return self._model.states_out > 0

    def no_states(self, num_tokens: int, device: torch.device) -> Tensor | None:
        """Zeros in place of the states that the model takes for so many tokens; None if it takes none."""
        width = self._model.states_in
        return torch.zeros(num_tokens, width, device=device) if width else None

    def states(self, planned: PlannedBatch) -> Tensor:
        """A copy of the states [num_tokens, width] that the model gave for the step's tokens, without padding.

        Raises `BatchError` unless the step was the last one in its lane: the next one overwrites them.
        """
        batch, lane = planned.batch, planned.plan.certificate.lane
        if not self._model.states_out or self._states_of.get(lane) != batch.batch_id:
            last = self._states_of.get(lane)
            raise BatchError(
                "states", None, f"those of batch {batch.batch_id}, the last one to run in lane {lane}", f"batch {last}"
            )
        scratch = self._activations[lane].shaped(batch.num_tokens)
        return scratch.of(MadeStates, self._model.states_out).states[: sum(batch.work.query_lens)].clone()

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
        with current.in_stream_order(), self._companions.along(current.batch, is_captured=True):
            recording = self._planner.lanes.run(lane, Depth.RUNNING, recorder.record, work)
        self._planner.pin(current)
        self._recordings[current.batch.memory] = recording

    def _forward(self, planned: PlannedBatch, states: Tensor | None, beside: Sequence[Beside]) -> Tensor:
        current = self._planner.ensure(planned)
        lane = current.plan.certificate.lane
        recording = self._recordings.get(current.batch.memory)
        self._states_of.pop(lane, None)
        self._give(current.batch, lane, states)
        try:
            self._planner.launch(current)
            self._states_of[lane] = current.batch.batch_id
            with current.in_stream_order(), self._companions.along(current.batch, beside) as join:
                if recording is not None:
                    return join(self._planner.lanes.run(lane, Depth.RUNNING, self._replay, recording, current))
                return join(self._planner.lanes.run(lane, Depth.RUNNING, self._run, current, self._activations[lane]))
        except BaseException:
            self._planner.take_back(current)
            raise

    def forward_halves(self, whole: Batch, halves: tuple[PlannedBatch, PlannedBatch]) -> Tensor:
        """Like `forward`, of a step that is cut in two, each half in a lane of its own. The whole has no plan."""
        for each in halves:
            _require_plan(each)
        if self._second is None or len({each.plan.certificate.lane for each in halves}) < 2:
            raise PlanError("expected halves planned in two lanes of a runner that has two, got one lane")
        current = tuple(self._planner.ensure(each) for each in halves)
        try:
            for each in current:
                self._states_of.pop(each.plan.certificate.lane, None)
                self._give(each.batch, each.plan.certificate.lane, None)
                self._planner.launch(each)
            with self._companions.along(whole, halves=[each.batch for each in current]):
                outputs = self._second.both(*(partial(self._run_half, each) for each in current))
            self.num_halved += 1
            for each in current:
                self._states_of[each.plan.certificate.lane] = each.batch.batch_id
            return torch.cat(outputs)
        except BaseException:
            for each in current:
                self._planner.take_back(each)
            raise

    def _run_half(self, current: PlannedBatch) -> Tensor:
        lane = current.plan.certificate.lane
        with current.in_stream_order(), self._links.in_lane(lane):
            return self._planner.lanes.run(lane, Depth.RUNNING, self._run, current, self._activations[lane])

    def _give(self, batch: Batch, lane: Lane, states: Tensor | None) -> None:
        """Copies given states to where the model reads them, which a recording does too."""
        width, count = self._model.states_in, sum(batch.work.query_lens)
        found = None if states is None else tuple(states.shape)
        if found != ((count, width) if width else None):
            wanted = f"{count} of {width} numbers, one for each token" if width else "none: the model takes none"
            raise BatchError("states", None, wanted, "none" if found is None else found)
        if states is not None:
            scratch = self._activations[lane].shaped(batch.num_tokens)
            scratch.of(GivenStates, width).states[:count].copy_(states)

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
