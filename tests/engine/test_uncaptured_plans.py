"""A step whose plan does not fit the buffers that its graph reads runs eagerly, and is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sightline import LLM, SamplingParams
from sightline.attention.contract import StepView
from sightline.core.errors import UncapturedPlanError
from sightline.llm import TokensPrompt
from support import captured_engines
from support.captured_engines import CAPTURABLE
from support.case_marks import proofs
from support.graph_checks import Rows
from support.tiny_models import make_model, random_prompts

LONG = 12
PROMPTS = random_prompts([3, 9, 5], seed=3)
Take = Callable[..., Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(path)
    return path


def taking_more(size: int) -> Take:
    """A backend that takes another buffer for contexts that no capture had, which it must not."""

    def take(
        buffers: object, step: StepView, kept: object, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        if name == "query_lens" and max(step.batch.context_lens.bound, default=0) >= LONG:
            buffers.take("longer", (size,), torch.int64)  # type: ignore[attr-defined]
        return buffers.take(name, shape, dtype)  # type: ignore[attr-defined, no-any-return]

    return take


MORE = pytest.mark.parametrize("size", [1, *proofs(1 << 16)], ids=["elsewhere", "overflowing"])


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [list(output.outputs[0].token_ids) for output in outputs]


@MORE
@pytest.mark.parametrize("async_scheduling", [*proofs(False), True], ids=["waiting", "overlapped"])
def test_such_a_step_runs_eagerly_and_is_counted(
    size: int, folder: Path, monkeypatch: pytest.MonkeyPatch, *, async_scheduling: bool
) -> None:
    make = captured_engines.install(monkeypatch, replace(CAPTURABLE, take=taking_more(size)))
    eager = make(folder, cuda_graph_sizes=None, enforce_eager=True)
    llm = make(folder, async_scheduling=async_scheduling)
    assert answers(llm) == answers(eager)
    metrics = llm.engine.metrics()
    assert metrics.steps_uncaptured > 3
    assert llm.engine.runtime.runner.num_replayed > 3, "steps that fit are replayed"
    assert metrics.steps_cut == 0
    told = [each for each in llm.engine.ledger.degradations if each.subject == "cuda_graph_sizes"]
    assert 1 <= len(told) <= 4, "once for a number of rows, not once a step"
    assert all("run eagerly: a plan needs other buffers than the graph was captured with" in str(each) for each in told)
    assert eager.engine.metrics().steps_uncaptured == 0
    llm.engine.reset_counts()
    assert llm.engine.metrics().steps_uncaptured == 0


def test_under_strict_such_a_step_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = captured_engines.install(monkeypatch, replace(CAPTURABLE, take=taking_more(1)))
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    [output] = make(folder, strict=True).generate([TokensPrompt(prompt_token_ids=PROMPTS[0])], params, use_tqdm=False)
    assert output.error is not None
    assert "refused under --strict: cuda_graph_sizes" in output.error


@MORE
def test_the_planner_refuses_the_plan(size: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = captured_engines.install(monkeypatch, replace(CAPTURABLE, take=taking_more(size)))
    rows = Rows(make(folder).engine.runtime, [LONG])
    with pytest.raises(UncapturedPlanError, match=r"captured"):
        rows.plan((0,), [[1]])


def test_a_short_step_is_replayed_after_one_that_did_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = captured_engines.install(monkeypatch, replace(CAPTURABLE, take=taking_more(1)))
    rows = Rows(make(folder).engine.runtime, [LONG, 3])
    eager = Rows(make(folder, cuda_graph_sizes=None, enforce_eager=True).engine.runtime, [LONG, 3])
    with pytest.raises(UncapturedPlanError):
        rows.plan((0,), [[1]])
    before = rows.runtime.runner.num_replayed
    found, expected = rows.forward((1,), [[5]]), eager.forward((1,), [[5]])
    assert rows.runtime.runner.num_replayed == before + 1
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
