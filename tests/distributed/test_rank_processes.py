"""Ranks as processes: started with an engine, ended with it, and named if one cannot start."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sightline import LLM, SamplingParams
from sightline.core.errors import SightlineError
from support.tiny_served_model import save_tiny_served_model

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = ["one two three", "two", "three one one two"]
SETTINGS: dict[str, Any] = {"cache_tokens": 1024, "max_num_seqs": 4, "dist_timeout": 5.0}


def children() -> set[int]:
    """The processes that this one started, without those that only wait to be told of."""
    found = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in found if "rank_process" in Path(f"/proc/{pid}/cmdline").read_text()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_served_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def divided(folder: Path) -> Iterator[LLM]:
    llm = LLM(str(folder), tensor_parallel_size=2, **SETTINGS)
    yield llm
    llm.close()


def texts(llm: LLM) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_processes_answer_as_one_and_end_with_the_llm(folder: Path, divided: LLM) -> None:
    assert len(children()) == 1
    assert texts(divided) == texts(LLM(str(folder), **SETTINGS))
    divided.close()
    assert not children()


def test_a_rank_that_is_killed_is_named_and_nothing_is_left(divided: LLM) -> None:
    [pid] = children()
    os.kill(pid, signal.SIGKILL)
    outputs = divided.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert all(f"rank 1 (process {pid}) was killed by SIGKILL" in (output.error or "") for output in outputs)
    with pytest.raises(SightlineError, match="engine"):
        texts(divided)
    divided.close()
    assert not children()


def test_ranks_end_with_an_llm_that_nobody_holds(folder: Path) -> None:
    llm = LLM(str(folder), tensor_parallel_size=2, **SETTINGS)
    assert len(children()) == 1
    del llm
    gc.collect()
    deadline = time.monotonic() + 10
    while children():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_rank_that_cannot_start_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sightline.runner.crew.COMMAND", ("false",))
    with pytest.raises(SightlineError, match=r"rank 1 \(process \d+\) ended with exit code 1"):
        LLM(str(folder), tensor_parallel_size=2, **SETTINGS)
    assert not children()


@pytest.mark.prove
def test_replicas_answer_as_one_and_end_with_the_llm(folder: Path) -> None:
    llm = LLM(str(folder), data_parallel_size=2, tensor_parallel_size=2, **SETTINGS)
    assert len(children()) == 3
    expected = texts(LLM(str(folder), **SETTINGS))
    assert texts(llm) == expected
    assert all(prefixes.num_pages for prefixes in llm.engine.prefixes), "both replicas computed some"
    assert llm.engine.metrics().kv_cache_usage_perc == 0.0
    llm.close()
    assert not children()


def test_a_rank_of_another_replica_that_is_killed_is_named(folder: Path) -> None:
    llm = LLM(str(folder), data_parallel_size=2, **SETTINGS)
    [pid] = children()
    os.kill(pid, signal.SIGKILL)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert all(f"rank 1 (process {pid}) was killed by SIGKILL" in (output.error or "") for output in outputs)
    llm.close()
    assert not children()


NGRAM: dict[str, Any] = {"speculative_config": {"method": "ngram"}}


@pytest.mark.prove
@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 3},
        {"tensor_parallel_size": 3, **NGRAM},
        {"data_parallel_size": 2},
        {"data_parallel_size": 2, "tensor_parallel_size": 2, **NGRAM},
    ],
    ids=["three ranks", "three ranks, n-gram", "two replicas", "two replicas of two ranks, n-gram"],
)
def test_a_real_model_among_processes_answers_as_one(settings: dict[str, Any]) -> None:
    prompts = ["The capital of France is", "Once upon a time, once upon a time,", "One, two, three,"]
    params = SamplingParams(max_tokens=24, temperature=0.0)
    found = []
    for given in ({}, settings):
        llm = LLM(max_model_len=256, cache_tokens=2048, **given)
        found.append([output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)])
        llm.close()
    assert found[0] == found[1]
