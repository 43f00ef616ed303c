"""Faults of captured steps, planted one by one: each fails the check that is named for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sightline.attention.planner import PlannedBatch, Planner
from sightline.core.batch import Batch
from sightline.core.batch_memory import StaticMemory
from sightline.core.errors import PlanError
from sightline.core.staging import NUM_BUFFERS, FinishedCopy, StagingRing
from sightline.runner.recording import Recorder, Recording
from sightline.runner.runner import Runner
from support import captured_engines
from support.graph_checks import CHECKS
from support.slow_copies import SlowDevice
from support.tiny_models import make_model

pytestmark = pytest.mark.prove
TOKENS, CONTEXTS, FIRST_POOL = 0, 5, 8
"""Places of lists in what `StaticMemory.put` is given."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(path)
    return path


_put = StaticMemory.put


def scatters_padding(self: StaticMemory, lists: Sequence[Sequence[int]], device: torch.device) -> Any:
    """Padding tokens write to the page of the first row."""
    slots = [[*each, *[each[0] + 1] * (self.shape.size - len(each))] for each in lists[FIRST_POOL:]]
    return _put(self, [*lists[:FIRST_POOL], *slots], device)


def turns_tokens(self: StaticMemory, lists: Sequence[Sequence[int]], device: torch.device) -> Any:
    """Each row gets the token of the row before it."""
    return _put(self, [[*lists[TOKENS][-1:], *lists[TOKENS][:-1]], *lists[1:]], device)


def keeps_lengths(self: StaticMemory, lists: Sequence[Sequence[int]], device: torch.device) -> Any:
    """The context lengths are those of the step before."""
    before = self._views[CONTEXTS].tolist()[: len(lists[CONTEXTS])]
    return _put(self, [*lists[:CONTEXTS], before, *lists[CONTEXTS + 1 :]], device)


def hands_out_its_memory(self: Runner, recording: Recording, current: PlannedBatch) -> Tensor:
    """The logits are not copied."""
    self.num_replayed += 1
    return recording.replay()[: len(current.batch.logit_places)]


def plans_again(self: Runner, planned: PlannedBatch, recorder: Recorder) -> None:
    """The step is planned once more for the capture."""
    _capture(self, self._planner.plan(planned.batch), recorder)


def plans_inside(self: Runner, planned: PlannedBatch, recorder: Recorder) -> None:
    """The work that is captured plans."""
    run = self._run
    self._run = lambda *args: (self._planner.plan(planned.batch), run(*args))[1]  # type: ignore[method-assign]
    _capture(self, planned, recorder)


_capture = Runner._capture


@dataclass(frozen=True)
class Planted:
    """A fault."""

    owner: type
    attribute: str
    fault: Any
    caught_by: str
    message: str


FIVE_ROWS = "a_step_of_five_rows_in_a_bucket_of_eight_is_the_eager_one"
LOGITS = "the logits are not those of the eager step"
FAULTS = {
    "stale bucket replayed": Planted(
        Batch, "is_overwritten", property(lambda _: False), "a_stale_bucket_is_not_replayed", "another batch in it"
    ),
    "pages that changed owner replayed": Planted(
        Planner, "_batch_changes", lambda *_: (), "a_stale_bucket_is_not_replayed", "bucket was replayed|changed owner"
    ),
    "padding row scattered into a live page": Planted(
        StaticMemory, "put", scatters_padding, "padding_touches_no_live_page", "a slot was written that is no row's"
    ),
    "token of another row": Planted(StaticMemory, "put", turns_tokens, FIVE_ROWS, LOGITS),
    "length buffer one step late": Planted(StaticMemory, "put", keeps_lengths, FIVE_ROWS, LOGITS),
    "logits handed out in graph memory": Planted(
        Runner, "_replay", hands_out_its_memory, "logits_outlive_the_next_step", "overwrote the logits"
    ),
    "graph memory reused by eager": Planted(
        Planner,
        "_buffers",
        lambda self, batch, lane: self._memory[lane],
        "eager_steps_move_nothing_that_a_graph_reads",
        "an eager step changed what a graph reads",
    ),
    "plan made twice for a capture": Planted(
        Runner,
        "_capture",
        plans_again,
        "a_bucket_is_planned_once_before_it_is_captured",
        "planned inside the capture",
    ),
    "plan made inside a capture": Planted(
        Runner, "_capture", plans_inside, "a_bucket_is_planned_once_before_it_is_captured", "expected no call in lane"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_its_check(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = FAULTS[name]
    make = partial(captured_engines.install(monkeypatch), paranoid=False)
    monkeypatch.setattr(planted.owner, planted.attribute, planted.fault)
    with pytest.raises((AssertionError, PlanError), match=planted.message):
        CHECKS[planted.caught_by](make, folder)


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "staging buffer reused before its event"])
def test_a_staging_buffer_reused_before_its_event_is_seen(monkeypatch: pytest.MonkeyPatch, *, waits: bool) -> None:
    device = SlowDevice(monkeypatch)
    make_event: Callable[[], Any] = device.event if waits else FinishedCopy
    ring = StagingRing(1, torch.device("cpu"), make_event)
    targets = [torch.zeros(1, dtype=torch.int64) for _ in range(NUM_BUFFERS + 1)]
    for number, target in enumerate(targets):
        ring.copy([[number]], target)
    device.finish()
    assert ([int(target) for target in targets] == list(range(NUM_BUFFERS + 1))) == waits
