"""Before an engine on a GPU is ready, steps of every kind that it may serve have run, and nothing is left of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sightline import LLM, SamplingParams
from sightline.attention.planner import PlannedBatch
from sightline.core.config import EngineConfig
from sightline.core.errors import ConfigError
from sightline.core.ledger import Ledger
from sightline.engine.rehearsal import KINDS, rehearse
from sightline.llm import TokensPrompt
from sightline.models.loading.opening import open_checkpoint
from sightline.runner.build import build_embedding_runtime, build_runtime
from sightline.runner.progress import BuildPhase, BuildStep
from sightline.runner.runner import Runner
from sightline.runner.runtime import Runtime
from sightline.runner.startup import startup_report
from sightline.runner.warm_up import embedding_kinds, octaves, paged_kinds, powers
from support.captured_engines import install
from support.processes import with_support
from support.tiny_models import make_model, random_prompts

SMALL: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "cache_tokens": 512,
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "page_size": 4,
}
ASKED = ("dtype=float16", "max_num_batched_tokens=256", "max_num_seqs=48")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(path)
    return path


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    return install(monkeypatch)


def test_every_octave_is_tried_at_both_ends_and_in_its_middle() -> None:
    assert octaves(1) == [1]
    assert octaves(2) == [1, 2]
    assert octaves(20) == [1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 20]
    assert powers(1) == []
    assert powers(20) == [2, 4, 8, 16]


def test_only_steps_that_a_scheduler_can_make_are_tried(folder: Path) -> None:
    config = runtime_of(folder).config
    kinds = paged_kinds(config)
    assert len(set(kinds)) == len(kinds)
    for kind in kinds:
        lens = [kind.context_len + tokens for tokens in kind.queries]
        assert len(lens) <= config.max_rows
        assert sum(kind.queries) <= config.max_step_tokens
        assert max(lens) <= config.max_model_len
        assert sum(-(-each // config.page_size) for each in lens) * config.page_size <= config.cache_tokens


def test_decode_prompts_both_together_continued_prompts_and_scored_ones_are_tried(folder: Path) -> None:
    kinds = paged_kinds(runtime_of(folder).config)
    decoding = {len(kind.queries) for kind in kinds if set(kind.queries) == {1} and kind.context_len}
    assert {1, 8} <= decoding
    assert (32,) in {kind.queries for kind in kinds if not kind.context_len}, "the longest chunk"
    assert any(kind.queries == (16,) and kind.context_len for kind in kinds), "a chunk behind another"
    assert any(1 in kind.queries and max(kind.queries) > 1 for kind in kinds), "decode beside a prompt"
    assert any(kind.scores for kind in kinds)


def test_texts_are_tried_whole_and_in_chunks_where_the_engine_does_both(folder: Path) -> None:
    config = EngineConfig(**{**SMALL, "task": "embed", "max_num_batched_tokens": 32})
    ledger = Ledger()
    runtime, _ = build_embedding_runtime(config, open_checkpoint(folder, ledger), ledger)
    kinds = embedding_kinds(runtime.config)
    assert {kind.is_whole for kind in kinds} == {True, False}


def test_nothing_is_tried_on_a_cpu_that_compiles_nothing(folder: Path) -> None:
    told: list[BuildPhase] = []
    runtime = runtime_of(folder, on_step=lambda step: told.append(step.phase), layer_kernels="torch")
    assert set(told) == {BuildPhase.WEIGHTS}
    assert set(runtime.times.seconds) == {BuildPhase.WEIGHTS}
    assert runtime.planner.num_plans == 0


def test_a_cpu_that_compiles_tells_so_and_tries_a_step_of_few_and_of_several_tokens(folder: Path) -> None:
    pytest.importorskip("numba")
    told: list[BuildStep] = []
    runtime = runtime_of(folder, on_step=told.append)
    assert [*dict.fromkeys(step.phase for step in told)] == [BuildPhase.WEIGHTS, BuildPhase.KERNELS, BuildPhase.GRAPHS]
    assert [step.what for step in told if step.phase is BuildPhase.KERNELS] == [
        "for this processor, or loading those of earlier starts",
        "1 row, 1 new token behind 3",
        "1 row, 9 new tokens",
        "",
    ]
    assert set(runtime.times.seconds) == {BuildPhase.WEIGHTS, BuildPhase.KERNELS, BuildPhase.GRAPHS}


def test_each_phase_is_named_while_it_runs_and_timed_at_the_end(make: Callable[..., LLM], folder: Path) -> None:
    told: list[BuildStep] = []
    runtime = runtime_of(folder, on_step=told.append, cuda_graph_sizes="1,2", layer_kernels="torch")
    assert [*dict.fromkeys(step.phase for step in told)] == [BuildPhase.WEIGHTS, BuildPhase.KERNELS, BuildPhase.GRAPHS]
    assert "compiling kernels: 8 rows, 8 new tokens behind 3" in {step.title for step in told}
    assert "recording decode steps: 2 tokens, one a row" in {step.title for step in told}
    assert all(step.what for step in told if step.done < step.total)
    lines = " ".join(startup_report(runtime))
    assert all(f"{phase.value}: " in lines for phase in (BuildPhase.WEIGHTS, BuildPhase.KERNELS, BuildPhase.GRAPHS))


def test_rows_pages_and_counts_are_as_before(make: Callable[..., LLM], folder: Path) -> None:
    llm = make(folder)
    store = llm.engine.runtime.store
    assert (store.num_free_rows, store.num_free_pages) == (8, store.num_usable_pages)
    assert llm.engine.metrics().plans == 0


def test_a_step_that_cannot_run_is_refused_at_start_with_its_kind_and_the_memory(
    make: Callable[..., LLM], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Runner.forward

    def failing(self: Runner, planned: PlannedBatch, states: Tensor | None = None) -> Tensor:
        if planned.batch.num_tokens == 32:
            raise RuntimeError("out of memory")
        return forward(self, planned, states)

    monkeypatch.setattr(Runner, "forward", failing)
    with pytest.raises(ConfigError, match=r"step of 1 row, 32 new tokens that can run, got: out of memory;.*GiB free"):
        make(folder)


def test_rehearsed_requests_leave_nothing_and_change_no_answer(folder: Path) -> None:
    llm = LLM(str(folder), **SMALL)
    prompt: TokensPrompt = {"prompt_token_ids": random_prompts([9])[0]}
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    expected = LLM(str(folder), **SMALL).generate([prompt], params, use_tqdm=False)
    told: list[str] = []
    rehearse(llm.engine, lambda step: told.append(step.what))
    assert told == [*KINDS, ""]
    assert llm.engine.metrics().steps == 0
    assert llm.engine.runtime.store.num_free_pages == llm.engine.runtime.store.num_usable_pages
    got = llm.generate([prompt], params, use_tqdm=False)
    assert got[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert got[0].num_cached_tokens == 0


def runtime_of(folder: Path, on_step: Callable[[BuildStep], None] = lambda _: None, **changes: Any) -> Runtime:
    ledger = Ledger()
    return build_runtime(EngineConfig(**{**SMALL, **changes}), open_checkpoint(folder, ledger), ledger, on_step)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("llama", marks=pytest.mark.prove),
        pytest.param("gemma3", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", marks=pytest.mark.prove),
        pytest.param("gpt_oss", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
    ],
)
def test_random_steps_need_no_kernel_that_the_warm_up_did_not(family: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    make_model(family).save_pretrained(tmp_path)
    backend = "triton-latent" if family.startswith("deepseek") else "triton"
    words = [str(tmp_path), *ASKED, f"attention_backend={backend}", "cache_tokens=8192"]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.needed_kernels", *words],
        env=with_support("TRITON_INTERPRET"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    [warmed, *missing] = run.stdout.splitlines()
    assert int(warmed) > 20
    assert missing == []
