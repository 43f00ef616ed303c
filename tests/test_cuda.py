"""On an NVIDIA GPU: the kit passes there, and the engine answers as it does on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sightline import LLM, SamplingParams
from sightline.attention.backends import registry
from sightline.core.device import detect_device
from sightline.llm import TokensPrompt
from sightline.testing.conformance.kit import Verdict, checks_of, try_check
from sightline.testing.conformance.rows import RowToTry, list_rows
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.trial import Effort
from support.engines import is_at_rest
from support.processes import with_support
from support.threads import together
from support.tiny_models import FAMILIES, make_model, random_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # Warnings of what FlashAttention 4 imports.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning"),
]


def rows() -> list[RowToTry]:
    if not torch.cuda.is_available():
        return []
    return [row for row in list_rows(registry.BUILT_IN, detect_device("cuda")) if isinstance(row, RowToTry)]


CHECKS = {
    f"{row.candidate.name}-{row.label}-{check.name}": (row, check) for row in rows() for check in checks_of(row.subject)
}
"""Each check of each row by itself: kernels are compiled on first use, and processes that share the work share that."""


@pytest.mark.parametrize("name", CHECKS)
def test_the_whole_kit_passes(name: str) -> None:
    row, check = CHECKS[name]
    samples = Samples().for_problem(row.subject.problem)
    result = try_check(check, row.subject, Effort.FULL, samples)
    assert result.verdict in (Verdict.PASSED, Verdict.EXCUSED), (result.detail, result.case, result.trace)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    prompts: list[TokensPrompt] = [{"prompt_token_ids": prompt} for prompt in random_prompts([3, 40, 1, 17])]
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    answers = {
        device: [
            output.outputs[0].token_ids
            for output in LLM(
                str(tmp_path),
                skip_tokenizer_init=True,
                cache_tokens=2048,
                device=device,
                dtype="float32",
                paranoid=True,
            ).generate(prompts, params, use_tqdm=False)
        ]
        for device in ("cpu", "cuda")
    }
    assert answers["cuda"] == answers["cpu"]


@pytest.mark.parametrize("backend", ["torch", "triton", None])
def test_real_weights_answer_as_on_the_cpu(backend: str | None) -> None:
    """Greedy in fp32, which has no tensor cores to round: the default model's own tokens."""
    params = SamplingParams(max_tokens=48, ignore_eos=True, temperature=0.0)
    prompts = ["The capital of France is", "def fibonacci(n):", "Once upon a time, in a village by the river,", "1, 2,"]
    cpu = LLM(dtype="float32", cache_tokens=2048).generate(prompts, params, use_tqdm=False)
    card = LLM(dtype="float32", cache_tokens=2048, device="cuda", attention_backend=backend)
    answers = card.generate(prompts, params, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in answers] == [each.outputs[0].token_ids for each in cpu]


@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
def test_threads_on_streams_of_their_own_get_the_answers_of_one(in_flight: bool, tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    llm = LLM(
        str(tmp_path),
        skip_tokenizer_init=True,
        cache_tokens=2048,
        device="cuda",
        dtype="float32",
        async_scheduling=in_flight,
    )
    prompts: list[TokensPrompt] = [{"prompt_token_ids": prompt} for prompt in random_prompts([9, 14, 3, 30])]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)

    def answers(prompt: TokensPrompt) -> list[tuple[int, ...]]:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            found = [llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(10)]
        return [output.outputs[0].token_ids for output in found]

    expected = [answers(prompt) for prompt in prompts]
    assert together([lambda prompt=prompt: answers(prompt) for prompt in prompts]) == expected  # type: ignore[misc]


@pytest.mark.parametrize("small", [False, True], ids=["roomy", "retracted"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_steps_in_flight_give_the_answers_of_steps_one_after_the_other(
    family: str, small: bool, tmp_path: Path
) -> None:
    make_model(family).save_pretrained(tmp_path)
    prompts: list[TokensPrompt] = [{"prompt_token_ids": prompt} for prompt in random_prompts([9, 14, 3, 30, 6])]
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=4, max_tokens=24, ignore_eos=True, n=3),
        SamplingParams(temperature=0.8, seed=5, max_tokens=9, ignore_eos=True, repetition_penalty=1.3, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, prompt_logprobs=1, logprobs=1),
        SamplingParams(temperature=0.7, top_k=5, seed=1, max_tokens=1, ignore_eos=True),
    ]
    answers = []
    for in_flight in (False, True):
        llm = LLM(
            str(tmp_path),
            skip_tokenizer_init=True,
            cache_tokens=72 if small else 2048,
            max_model_len=64,
            page_size=4,
            device="cuda",
            dtype="float32",
            paranoid=True,
            async_scheduling=in_flight,
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([[each.token_ids for each in output.outputs] for output in outputs])
        assert (llm.engine.num_retractions > 0) == small
        assert is_at_rest(llm)
    assert answers[0] == answers[1]


def test_a_device_that_dies_answers_everybody(tmp_path: Path) -> None:
    """In a process of its own: a CUDA context does not come back."""
    make_model("llama").save_pretrained(tmp_path)
    command = [sys.executable, "-m", "support.dying_device", str(tmp_path)]
    run = subprocess.run(command, env=with_support(), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == ["error"] * 5 + ["closed"]
