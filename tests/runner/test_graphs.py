"""Steps that are captured and replayed give the answers of eager ones, and nothing runs on what is stale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sightline import LLM, SamplingParams
from sightline.attention.capability import GraphLevel
from sightline.attention.planner import PlannedBatch
from sightline.core.batch import FULL, RowWork, StepWork
from sightline.core.errors import ConfigError, LaneBusyError, PlanError
from sightline.core.staging import StagingRing
from sightline.layers.scratch import Scratch
from sightline.models.decoder import Decoder
from sightline.runner.startup import startup_report
from support import captured_engines
from support.captured_engines import CAPTURABLE
from support.graph_checks import CHECKS, Rows, eager_of, runtime_of
from support.tiny_models import make_model

ALL = "answers_are_those_of_eager_steps"
QUICK = (
    "a_step_of_five_rows_in_a_bucket_of_eight_is_the_eager_one",
    "padding_touches_no_live_page",
    "a_stale_bucket_is_not_replayed",
)


def saved(family: str, path: Path) -> Path:
    make_model(family).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    return captured_engines.install(monkeypatch)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.prove) for name in CHECKS]
)
def test_captured_steps(name: str, folder: Path, make: Callable[..., LLM]) -> None:
    CHECKS[name](make, folder)


@pytest.mark.prove
@pytest.mark.parametrize("family", ["gemma3", "qwen2"])
def test_a_model_of_two_groups_is_captured_too(family: str, tmp_path: Path, make: Callable[..., LLM]) -> None:
    CHECKS[ALL](make, saved(family, tmp_path))


@pytest.mark.prove
def test_a_step_with_the_logits_of_every_token_is_replayed(folder: Path, make: Callable[..., LLM]) -> None:
    """As a step that verifies a draft has."""
    runtimes = [eager_of(make, folder), runtime_of(make, folder)]
    found = []
    for runtime in runtimes:
        rows = Rows(runtime, [5, 9])
        for index, row in enumerate(rows.rows):
            runtime.store.grow_row(row, rows.lens[index] + 3)
        work = [RowWork(row, [1, 2, 3], rows.lens[index], 3) for index, row in enumerate(rows.rows)]
        before = runtime.runner.num_replayed
        found.append(runtime.runner.forward(runtime.planner.plan(runtime.graphs.assemble(StepWork.of(work)))))
        assert runtime.runner.num_replayed - before == (runtime is runtimes[1])
    assert found[0].shape[0] == 6
    assert torch.allclose(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.prove
def test_without_paranoia_answers_are_the_same(folder: Path, make: Callable[..., LLM]) -> None:
    CHECKS[ALL](partial(make, paranoid=False), folder)


def shapes_of(llm: LLM) -> list[tuple[int, int]]:
    return [(each.shape.size, each.shape.query_bound) for each in llm.engine.runtime.graphs.buckets]


@pytest.mark.prove
def test_decode_is_captured_for_each_size_and_mixed_steps_where_backends_declare_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = [(1, 1), (3, 1), (8, 1)]
    full = captured_engines.install(monkeypatch)
    assert shapes_of(full(folder, cuda_graph_sizes="8, 1,3")) == [*decode, (3, 3), (8, 8)]
    narrow = captured_engines.install(monkeypatch, level=GraphLevel.DECODE)
    assert shapes_of(narrow(folder, cuda_graph_sizes="1,3,8")) == decode


def test_a_backend_that_cannot_be_captured_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = captured_engines.install(monkeypatch, level=GraphLevel.NONE)(folder, cuda_graph_sizes="4")
    assert shapes_of(llm) == []
    [entry] = [each for each in llm.engine.ledger.degradations if each.subject == "cuda_graph_sizes"]
    assert entry.outcome == "steps of 4 rows run eagerly: MadeOfParts, which serves group0, cannot be captured"


def test_a_forward_that_reads_values_on_the_host_is_refused_at_the_start(
    folder: Path, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Decoder.forward

    def reads(self: Decoder, planned: PlannedBatch, scratch: Scratch) -> torch.Tensor:
        logits = forward(self, planned, scratch)
        return logits * float(logits.sum().item() != 0.5)

    monkeypatch.setattr(Decoder, "forward", reads)
    with pytest.raises(
        ConfigError, match=r"expected a step of 8 tokens, .* captured in a CUDA graph, got: .*enforce_eager"
    ):
        make(folder)


@pytest.mark.prove
def test_a_plan_that_is_made_inside_a_capture_is_refused(
    folder: Path, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = runtime_of(make, folder)
    rows = Rows(runtime, [5])
    planned = rows.plan((0,), [[1]])

    class PlansAgain:
        num_bytes = 0

        def record(self, work: Callable[[], torch.Tensor]) -> None:
            runtime.planner.plan(planned.batch)

    with pytest.raises(LaneBusyError):
        runtime.runner.capture(planned, PlansAgain())  # type: ignore[arg-type]


@pytest.mark.prove
def test_a_batch_planned_again_is_replayed_on_its_last_plan(folder: Path, make: Callable[..., LLM]) -> None:
    rows = Rows(runtime_of(make, folder), [5, 9])
    planned = rows.plan((0, 1), [[1], [2]])
    rows.runtime.planner.plan(planned.batch)
    assert rows.runtime.runner.forward(planned).isfinite().all()
    assert rows.runtime.planner.num_rebuilt == 1


@pytest.mark.prove
@pytest.mark.parametrize(
    "work",
    [
        [RowWork(1, [1] * 9, 0, 1)],
        [RowWork(1, [1, 2], 0, 1, FULL)],
        [RowWork(row, [1, 2], 0, 1) for row in range(1, 6)],
        [RowWork(row, [1], 0, 1) for row in range(1, 7)],
        [RowWork(row, [1] if row == 1 else [], 0, 0) for row in range(1, 7)],
    ],
    ids=["long", "mask", "tokens", "rows", "rows without tokens"],
)
def test_a_step_that_fits_no_bucket_is_eager(folder: Path, make: Callable[..., LLM], work: list[RowWork]) -> None:
    runtime = runtime_of(make, folder, cuda_graph_sizes="1,2,5", page_size=16)
    for row in range(1, 9):
        assert runtime.store.open_row() == row
        runtime.store.grow_row(row, 16)
    batch = runtime.graphs.assemble(StepWork.of(work))
    assert batch.memory not in runtime.graphs.buckets
    assert (batch.num_rows, batch.num_tokens) == (len(work), sum(len(row.tokens) for row in work))


@pytest.mark.prove
def test_the_smallest_bucket_that_fits_is_taken(folder: Path, make: Callable[..., LLM]) -> None:
    rows = Rows(runtime_of(make, folder), [3, 3, 3])
    for indices, tokens, expected in (
        ((0,), [[1]], (1, 1)),
        ((0, 1, 2), [[1]] * 3, (4, 1)),
        ((0, 1), [[1], [1, 2]], (4, 4)),
        ((0,), [[1] * 8], (8, 8)),
    ):
        batch = rows.plan(indices, tokens).batch
        assert (batch.num_rows, batch.query_lens.bound[0]) == expected


def test_a_plan_that_needs_other_buffers_than_were_captured_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_length(buffers: object, step: object, kept: object, name: str, shape: object, dtype: object) -> torch.Tensor:
        longest = max(step.batch.context_lens.bound, default=0)  # type: ignore[attr-defined]
        if name == "query_lens" and longest:
            buffers.take("longer", (longest,), torch.int64)  # type: ignore[attr-defined]
        return buffers.take(name, shape, dtype)  # type: ignore[attr-defined, no-any-return]

    make = captured_engines.install(monkeypatch, replace(CAPTURABLE, take=by_length))
    rows = Rows(runtime_of(make, folder), [12])
    with pytest.raises(PlanError, match="plan buffers of a captured graph at their captured addresses, got others for"):
        rows.plan((0,), [[1]])


@pytest.mark.prove
def test_progress_and_memory_are_told(folder: Path, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = iter(range(0, 1 << 40, 3 << 20))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: next(reserved))
    runtime = runtime_of(make, folder)
    assert "7 CUDA graphs for 1, 2, 4, 8 rows: 21 MiB" in startup_report(runtime)


@pytest.mark.prove
def test_captures_leave_no_row_open_and_no_page_taken(folder: Path, make: Callable[..., LLM]) -> None:
    store = runtime_of(make, folder).store
    assert (store.num_free_rows, store.num_free_pages) == (8, store.num_usable_pages)
    assert [store.open_row() for _ in range(3)] == [1, 2, 3]


@pytest.mark.prove
def test_tokens_that_a_step_in_flight_chooses_are_put_into_the_bucket(folder: Path, make: Callable[..., LLM]) -> None:
    runtime = runtime_of(make, folder)
    rows = Rows(runtime, [5])
    runtime.store.grow_row(rows.rows[0], 6)
    batch = runtime.graphs.assemble(StepWork.of([RowWork(rows.rows[0], [], 5, 1, unread=1)]), torch.tensor([41, 42]))
    assert batch.tokens.tolist() == [42]
    assert batch.tokens.data_ptr() == runtime.graphs.buckets[0]._views[0].data_ptr()
    assert runtime.runner.forward(runtime.planner.plan(batch)).shape[0] == 1


def test_a_greedy_step_behind_one_in_flight_sends_numbers_once(
    folder: Path, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(folder, async_scheduling=True, paranoid=False, cuda_graph_sizes="2").engine
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    requests = [engine.submit(prompt, params) for prompt in ([1, 2, 3], [4, 5])]
    for _ in range(4):
        engine.step()
    sizes = []
    copy = StagingRing.copy

    def counted(ring: StagingRing, columns: Sequence[Sequence[int]], target: Tensor) -> None:
        sizes.append(len(target))
        copy(ring, columns, target)

    def refused(*_: object) -> tuple[Tensor, ...]:
        raise AssertionError("a second copy")

    before = engine.runtime.runner.num_replayed
    with monkeypatch.context() as patch:
        patch.setattr(StagingRing, "copy", counted)
        for module in ("core.lengths", "runner.sampling.sampler"):
            patch.setattr(f"sightline.{module}.sent", refused)
        for _ in range(5):
            engine.step()
    assert (len(sizes), engine.runtime.runner.num_replayed - before) == (5, 5)
    while engine.has_work:
        engine.step()
    assert [engine.pop_output(each).error for each in requests] == [None, None]
