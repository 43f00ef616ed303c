"""Prefill of a hybrid of latent and recurrent layers crashed on every prompt, because the wrapper around its two
backends did not pass the planning of chunks on: `q.shape[0] (8218) does not match qo_indptr[-1] (800)` (SGLang PR
27316, for Ring and Kimi Linear). The fix covered one latent backend; another still raised a TypeError.

Here such a model prefills on a cached prefix with every latent backend that there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from sightline import LLM, SamplingParams
from sightline.attention import capability
from sightline.attention.backends.torch.recurrent_backend import TorchRecurrentBackend
from sightline.core import resolution
from sightline.core.config import EngineConfig
from sightline.core.device import Device, DeviceKind
from sightline.llm import TokensPrompt
from support.blackwell_adapters import LATENT_ADAPTERS
from support.case_marks import proofs, routine
from support.hybrid_prefills import RECORDED, check_steps, install_recorded, pairs_on, recorded_backends, turned
from support.latent_backends import LATENT, STOOD_IN, latent_backend
from support.tiny_kimi import make_kimi, make_wide_kimi
from support.tiny_models import load_runtime, random_prompts, reference_logits, relative_error

TOLERANCE = 2e-4
HALF_TOLERANCE = 0.01
"""For bf16, of the direction of logits."""
FAMILIES = ["kimi_linear", pytest.param("bailing_hybrid", marks=pytest.mark.prove)]
EXACT = [name for name in LATENT if name not in STOOD_IN]
PAGE_SIZES = dict.fromkeys(LATENT_ADAPTERS, 32)
"""Of the backends that serve few page sizes."""
RECURRENT = (TorchRecurrentBackend, TorchRecurrentBackend.capabilities)

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's kernels are compiled here"),
    # The interpreter computes with numpy, which warns where scores leave the range of exp2 on purpose, and of numbers
    # in a cache that nobody has written while an engine warms up. Outputs are compared all the same.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(scope="module", params=FAMILIES)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    model, folder = make_kimi(str(request.param)), tmp_path_factory.mktemp(str(request.param))
    model.save_pretrained(folder)
    return model, folder


def config(dtype: str, page_size: int = 16) -> EngineConfig:
    return EngineConfig(
        page_size=page_size,
        dtype=dtype,
        cache_tokens=512,
        max_num_seqs=4,
        attention_backend=RECORDED,
        enforce_eager=True,
    )


@pytest.mark.parametrize(
    "name", routine({each: each for each in EXACT}, *(each for each in EXACT if each != "triton-latent"))
)
def test_a_hybrid_prefills_behind_a_context_and_plans_every_group_of_every_step(
    hybrid: tuple[PreTrainedModel, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = hybrid
    with latent_backend(name) as latent:
        install_recorded(monkeypatch, latent, RECURRENT)
        check_steps(load_runtime(folder, config("float32")), model, relative_error, TOLERANCE)


@pytest.mark.parametrize("name", ["torch-latent", *proofs(*STOOD_IN)])
def test_a_hybrid_with_heads_of_real_sizes_prefills_behind_a_context(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the backends whose libraries need a GPU, over stand-ins as strict as those are: sizes, half precision."""
    monkeypatch.setattr(resolution, "lacks_products", lambda device, dtype: False)
    model = make_wide_kimi(num_heads=2)
    model.save_pretrained(tmp_path)
    with latent_backend(name) as latent:
        install_recorded(monkeypatch, latent, RECURRENT)
        page_size = PAGE_SIZES.get(name, 16)
        check_steps(load_runtime(tmp_path, config("bfloat16", page_size)), model, turned, HALF_TOLERANCE)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "triton-latent" else name for name in EXACT]
)
def test_an_engine_finds_the_prefix_and_answers_as_transformers_does(
    hybrid: tuple[PreTrainedModel, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second prompt begins with the first, and the third with half of it."""
    model, folder = hybrid
    first, *ends = random_prompts([48, 30, 41], seed=3)
    prompts = [first, first + ends[0], first[:24] + ends[1]]
    with latent_backend(name) as latent:
        install_recorded(monkeypatch, latent, RECURRENT)
        llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            cache_tokens=512,
            page_size=8,
            max_num_batched_tokens=32,
            attention_backend=RECORDED,
            enforce_eager=True,
        )
        cached = [ask(llm, model, prompt) for prompt in prompts]
        found = [prefills(llm, group) for group in range(2)]
    assert cached[0] == 0
    assert cached[1] >= 40
    assert (cached[1], min(len(prompts[1]) - cached[1], 32)) in found[0]
    assert found[0] == found[1], "both groups are planned for the same rows"


def ask(llm: LLM, model: PreTrainedModel, prompt: Sequence[int]) -> int:
    """Checks the greedy answer; returns how many tokens were cached."""
    asked: TokensPrompt = {"prompt_token_ids": list(prompt)}
    [answer] = llm.generate([asked], SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0), use_tqdm=False)
    tokens = list(answer.outputs[0].token_ids)
    logits = reference_logits(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert bool((logits.max(dim=-1).values - chosen <= TOLERANCE * logits.abs().max()).all())
    return answer.num_cached_tokens or 0


def prefills(llm: LLM, group: int) -> list[tuple[int, int]]:
    """Context and new tokens of every row that a group was planned for and that is more than decode."""
    return [
        (context, new)
        for record in recorded_backends(llm.engine.runtime)[group].records
        for context, new in zip(*record.lengths, strict=True)
        if context and new > 1
    ]


def test_every_pair_that_a_gpu_tries_serves_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all libraries: a recurrent backend without decays per channel would end the engine's start."""
    monkeypatch.setattr(capability, "_is_installed", lambda package: True)
    hopper = Device(DeviceKind.CUDA, torch.device("cpu"), "a Hopper GPU", (9, 0))
    pairs = pairs_on(hopper)
    assert {"triton-recurrent", "torch-recurrent", "fla-recurrent"} == {recurrent for _, recurrent in pairs}
    assert {"triton-latent", "torch-latent", "flashinfer-latent"} <= {latent for latent, _ in pairs}
