"""Decode steps that are recorded as programs of CPU kernels give the answers of eager steps of torch's kernels."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from sightline import SamplingParams
from sightline.core.batch import Batch, RowWork, StepWork
from sightline.core.batch_memory import StaticMemory
from sightline.core.config import EngineConfig
from sightline.core.errors import BatchError
from sightline.core.ledger import Ledger
from sightline.kernels.cpu.program import inline_launcher
from sightline.kernels.cpu.record import Record
from sightline.llm import TokensPrompt
from sightline.models.loading.opening import open_checkpoint
from sightline.runner.build import build_runtime
from sightline.runner.progress import BuildPhase, BuildStep
from sightline.runner.recording import CpuRecorder, UnrecordableError
from sightline.runner.runtime import Runtime
from support import captured_engines
from support.cpu_launchers import CheckedLauncher
from support.graph_checks import CHECKS, Rows
from support.tiny_models import (
    FAMILIES,
    Models,
    load_runtime,
    make_dense_deepseek,
    make_model,
    random_prompts,
    relative_error,
)

DENSE = ("llama", "llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
QUICK = ("qwen3", "gemma2")
families = pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in QUICK else pytest.mark.prove) for each in DENSE]
)
make_engine = partial(captured_engines.make_engine, device="cpu", layer_kernels="numba", attention_backend="numba")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(path)
    return path


@pytest.mark.parametrize("name", CHECKS)
def test_recorded_steps(name: str, folder: Path) -> None:
    CHECKS[name](make_engine, folder)


def logits_of(folder: Path, **settings: Any) -> tuple[Runtime, Tensor]:
    """The logits of steps of one to three rows, over poisoned and shuffled pools."""
    runtime = load_runtime(folder, EngineConfig(cache_tokens=256, max_num_seqs=4, paranoid=True, **settings))
    rows = Rows(runtime, [5, 1, 21])
    steps = [([0], [[7]]), ([0, 1, 2], [[5], [9], [4]]), ([2, 1], [[3], [8]]), ([0, 1, 2], [[6], [6], [5]])]
    return runtime, torch.cat([rows.forward(indices, tokens) for indices, tokens in steps])


def decode_sizes(runtime: Runtime) -> list[int]:
    """The numbers of rows whose decode steps are recorded."""
    return [bucket.shape.size for bucket in runtime.graphs.buckets if bucket.shape.query_bound == 1]


@families
def test_every_dense_family_is_recorded_and_gives_the_logits_of_torch(models: Models, family: str) -> None:
    _, path = models[family]
    _, expected = logits_of(path, layer_kernels="torch", attention_backend="torch")
    runtime, got = logits_of(path)
    assert decode_sizes(runtime) == [1, 2, 4]
    # Each program keeps its logits.
    assert runtime.graphs.num_bytes >= sum(decode_sizes(runtime)) * got.shape[1] * got.itemsize
    assert runtime.runner.num_replayed >= 4
    assert relative_error(got, expected) <= 1e-5


@pytest.mark.parametrize("family", ["deepseek_v2", pytest.param("deepseek_v3", marks=pytest.mark.prove)])
def test_latent_attention_is_recorded_and_gives_the_logits_of_torch(family: str, tmp_path: Path) -> None:
    make_dense_deepseek(family).save_pretrained(tmp_path)
    _, expected = logits_of(tmp_path, layer_kernels="torch", attention_backend="torch-latent")
    runtime, got = logits_of(tmp_path)
    assert decode_sizes(runtime) == [1, 2, 4]
    assert runtime.runner.num_replayed >= 4
    assert relative_error(got, expected) <= 1e-5


def test_a_row_has_the_same_bits_whatever_is_in_the_other_rows_of_its_program(folder: Path) -> None:
    config = EngineConfig(cache_tokens=512, max_num_seqs=4)
    found = []
    for lens, others in (([30, 1, 40], [[9], [4]]), ([30, 50, 2], [[8], [3]]), ([30, 7, 7, 60], [[5], [5], [6]])):
        rows = Rows(load_runtime(folder, config), lens)
        logits = rows.forward(range(len(lens)), [[7], *others])
        assert rows.runtime.runner.num_replayed > 0
        found.append(logits[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@families
def test_greedy_answers_are_those_of_torch(models: Models, family: str) -> None:
    _, path = models[family]
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in random_prompts([9, 3, 17])]
    asked = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    answers = []
    for kernels in ("torch", "numba"):
        attention, sizes = ("torch", None) if kernels == "torch" else (None, "1,2,4,8")
        llm = make_engine(path, layer_kernels=kernels, attention_backend=attention, cuda_graph_sizes=sizes)
        answers.append([each.outputs[0].token_ids for each in llm.generate(prompts, asked)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in DENSE][:1])
def test_a_family_that_needs_torch_in_a_step_runs_eagerly_and_the_ledger_says_so(models: Models, family: str) -> None:
    _, path = models[family]
    ledger = Ledger(strict=True)
    config = EngineConfig(cache_tokens=256, max_num_seqs=4)
    runtime = build_runtime(config, open_checkpoint(path, ledger), ledger)
    assert runtime.graphs.buckets == ()
    [note] = [each for each in ledger.notes if each.subject == "cuda_graph_sizes"]
    assert "which only torch computes" in note.fact


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", QUICK)
def test_low_precision_is_recorded_and_gives_the_logits_of_torch(models: Models, family: str, dtype: str) -> None:
    _, path = models[family]
    runtimes, logits = [], []
    for kernels in ("torch", "auto"):
        ledger = Ledger()
        config = EngineConfig(cache_tokens=256, max_num_seqs=4, dtype=dtype, layer_kernels=kernels)
        runtimes.append(build_runtime(config, open_checkpoint(path, ledger), ledger))
        rows = Rows(runtimes[-1], [9, 3])
        logits.append(torch.cat([rows.forward([0, 1], [[7], [5]]) for _ in range(3)]))
    assert relative_error(logits[1], logits[0]) <= 0.05
    assert decode_sizes(runtimes[1]) == [1, 2, 4]
    assert runtimes[1].runner.num_replayed >= 3


def test_the_start_tells_what_is_recorded(folder: Path) -> None:
    ledger, steps = Ledger(), list[BuildStep]()
    config = EngineConfig(cache_tokens=256, max_num_seqs=4)
    build_runtime(config, open_checkpoint(folder, ledger), ledger, steps.append)
    recorded = [step.what for step in steps if step.phase is BuildPhase.GRAPHS]
    wanted = ["4 tokens, one a row", "4 tokens, up to 4 a row", "2 tokens, one a row", "2 tokens, up to 2 a row"]
    assert recorded == [*wanted, "1 token, one a row", ""]


def bucket_of(runtime: Runtime, size: int) -> StaticMemory:
    return next(bucket for bucket in runtime.graphs.buckets if bucket.shape.size == size)


def test_a_step_of_more_rows_than_its_program_is_refused(folder: Path) -> None:
    runtime = make_engine(folder).engine.runtime
    rows = [runtime.store.open_row() for _ in range(3)]
    for row in rows:
        runtime.store.grow_row(row, 1)
    work = [RowWork(row, [5], context_len=0, num_logits=1) for row in rows]
    with pytest.raises(BatchError, match="run it eagerly"):
        Batch.inside(StepWork.of(work), runtime.store.pools, bucket_of(runtime, 2))
    replayed = runtime.runner.num_replayed
    inside = Batch.inside(StepWork.of(work), runtime.store.pools, bucket_of(runtime, 4))
    assert runtime.runner.forward(runtime.planner.plan(inside)).shape[0] == 3
    assert runtime.runner.num_replayed == replayed + 1


def computing() -> Tensor:
    return torch.ones(3).add(1.0)


def copying() -> Tensor:
    return torch.empty(2, 2).t().contiguous()


def reading() -> Tensor:
    return torch.empty(int(torch.empty(1, dtype=torch.int64).sum().item()))


def converting() -> Tensor:
    return torch.empty(3, dtype=torch.bfloat16).float()


def reshaping() -> Tensor:
    return torch.empty(2, 3).t().reshape(6)


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("work", [computing, copying, reading, converting, reshaping])
def test_work_in_which_torch_computes_is_not_recorded(work: Any, inference: bool) -> None:
    launcher = inline_launcher()
    with torch.inference_mode(inference), pytest.raises(UnrecordableError, match=r"torch\."):
        CpuRecorder(launcher).record(work)
    # The launcher is as before.
    with launcher.recording() as tape:
        pass
    assert tape.records == []


@pytest.mark.parametrize("inference", [True, False])
def test_views_and_new_memory_are_no_computation(inference: bool) -> None:
    def work() -> Tensor:
        whole = torch.empty(4, 6)
        return whole.new_empty((2, 3)).view(3, 2)[1:].unsqueeze(0).float().contiguous()

    with torch.inference_mode(inference):
        recording = CpuRecorder(inline_launcher()).record(work)
    assert recording.replay().shape == (1, 2, 2)


class CountedLauncher(CheckedLauncher):
    """Counts what runs outside of a recording."""

    eager = 0

    def launch(self, record: Record) -> None:
        self.eager += self._recording.tape is None
        super().launch(record)


def test_a_recorded_step_launches_nothing_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = CountedLauncher(inline_launcher()._threads)
    monkeypatch.setattr("sightline.runner.build.make_launcher", lambda *_: launched)
    runtime = make_engine(folder).engine.runtime
    row = runtime.store.open_row()
    runtime.store.grow_row(row, 2)
    before = launched.eager
    for position in range(2):
        work = [RowWork(row, [5], context_len=position, num_logits=1)]
        runtime.runner.forward(runtime.planner.plan(runtime.graphs.assemble(StepWork.of(work))))
    assert (launched.eager, runtime.runner.num_replayed) == (before, 2)
