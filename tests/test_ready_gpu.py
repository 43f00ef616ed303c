"""On an NVIDIA GPU: an engine that is ready compiles nothing for any request."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from sightline import LLM, SamplingParams
from sightline.llm import TokensPrompt
from sightline.runner.progress import BuildPhase
from support.tiny_models import VOCAB, make_model

pytest.importorskip("triton")
import triton

from sightline.kernels.triton.norms import rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # Warnings of what FlashAttention 4 imports.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning"),
    pytest.mark.timeout(900),
]
NUM_REQUESTS = 96
UNUSED_SIZES = itertools.count(3001, 2)
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.1, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that Triton compiles or loads from its cache, as it does so."""
    names: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda *_, **told: names.append(str(told.get("repr")))
    )
    return names


def random_requests(seed: int, longest: int) -> tuple[list[TokensPrompt], list[SamplingParams]]:
    draw = random.Random(seed)
    prompts: list[TokensPrompt] = []
    params = []
    for number in range(NUM_REQUESTS):
        length = draw.choice([1, 2, draw.randint(1, 16), draw.randint(1, 64), draw.randint(1, longest)])
        prompts.append({"prompt_token_ids": [draw.randrange(3, VOCAB) for _ in range(length)]})
        chosen: dict[str, Any] = draw.choice(PARAMS)
        params.append(SamplingParams(max_tokens=draw.randint(1, 24), ignore_eos=True, seed=number, **chosen))
    return prompts, params


@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("llama", None),
        ("llama", "triton"),
        ("gemma3", "triton"),
        ("qwen3_moe", "triton"),
        ("gpt_oss", "triton"),
        ("deepseek_v3", "triton-latent"),
    ],
)
def test_random_requests_compile_nothing(
    family: str, backend: str | None, tmp_path: Path, compiled: list[str], *, is_eager: bool
) -> None:
    make_model(family).save_pretrained(tmp_path)
    llm = LLM(
        str(tmp_path),
        device="cuda",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        cache_tokens=16_384,
        max_num_seqs=48,
        max_num_batched_tokens=512,
        attention_backend=backend,
        enforce_eager=is_eager,
    )
    assert {BuildPhase.KERNELS, BuildPhase.REQUESTS} <= llm.engine.runtime.times.seconds.keys()
    compiled.clear()
    libraries = flashinfer_libraries()
    longest = llm.engine.runtime.config.max_model_len - 32
    for seed in range(3):
        outputs = llm.generate(*random_requests(seed, longest), use_tqdm=False)
        assert len(outputs) == NUM_REQUESTS
    assert compiled == []
    assert flashinfer_libraries() == libraries
    compile_something()
    assert compiled, "the hook does not see what is compiled"


def compile_something() -> None:
    """Launches a kernel for a size that nothing else in this process has."""
    x = torch.ones(1, next(UNUSED_SIZES), device="cuda")
    rms_norm(x, x[0].clone(), 1e-6, x)


def flashinfer_libraries() -> set[Path]:
    """What FlashInfer has compiled so far, on this machine."""
    return set((Path.home() / ".cache" / "flashinfer").rglob("*.so"))
