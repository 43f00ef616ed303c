"""On an NVIDIA GPU: a hybrid of latent and recurrent layers prefills on a cached prefix with every latent backend.

The same as `tests/regressions/test_hybrids_with_latent_attention_prefill_on_a_cached_prefix.py` (SGLang PR 27316), with
the libraries themselves.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from sightline import LLM, SamplingParams
from sightline.core.config import EngineConfig
from sightline.core.device import detect_device
from sightline.llm import TokensPrompt
from support.hybrid_prefills import (
    HEADS,
    LINEAR_DIM,
    OWN,
    PAGE_SIZE,
    RECORDED,
    WIDE_LATENT,
    WIDE_RECURRENT,
    check_steps,
    install_recorded,
    pairs_on,
    serving,
    turned,
)
from support.tiny_kimi import make_wide_kimi
from support.tiny_models import load_runtime, random_prompts, reference_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # Warnings of what FlashAttention 4 imports.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning"),
    # A warning of fla-core while it is imported.
    pytest.mark.filterwarnings("ignore:Flash Attention is not installed:ImportWarning"),
]
HALF_TOLERANCE = 0.01
"""For bf16, of the direction of logits."""
SLACK = 0.05
"""For bf16, how far the logit of the greedy token may be from the best one, of the logits' scale."""


DEVICE = detect_device("cuda") if torch.cuda.is_available() else None
LATENT, RECURRENT = ({} if DEVICE is None else serving(spec, DEVICE) for spec in (WIDE_LATENT, WIDE_RECURRENT))
PAIRS = [] if DEVICE is None else pairs_on(DEVICE)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    model, folder = make_wide_kimi(HEADS, LINEAR_DIM), tmp_path_factory.mktemp("wide")
    model.save_pretrained(folder)
    return model, folder


def test_every_latent_backend_that_has_a_library_is_here() -> None:
    optional = {"flashinfer-latent"} if find_spec("flashinfer") else set[str]()
    assert {"triton-latent", "torch-latent", *optional} <= set(LATENT)
    optional = {"fla-recurrent"} if find_spec("fla") else set()
    assert {*OWN, *optional} <= set(RECURRENT)


@pytest.mark.parametrize(("latent", "recurrent"), PAIRS)
def test_a_hybrid_prefills_behind_a_context_and_plans_every_group_of_every_step(
    hybrid: tuple[PreTrainedModel, Path], latent: str, recurrent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = hybrid
    served = [(each.load(), each.rows()) for each in (LATENT[latent], RECURRENT[recurrent])]
    install_recorded(monkeypatch, *served)
    config = EngineConfig(
        device="cuda",
        page_size=PAGE_SIZE,
        dtype="bfloat16",
        cache_tokens=1024,
        max_num_seqs=4,
        attention_backend=RECORDED,
        enforce_eager=True,
    )
    check_steps(load_runtime(folder, config), model, turned, HALF_TOLERANCE)


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize(("latent", "recurrent"), PAIRS)
def test_an_engine_finds_the_prefix_and_answers_as_transformers_does(
    hybrid: tuple[PreTrainedModel, Path], latent: str, recurrent: str, *, enforce_eager: bool
) -> None:
    """The second prompt begins with the first."""
    model, folder = hybrid
    first, end = random_prompts([150, 80], seed=3)
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        device="cuda",
        dtype="bfloat16",
        cache_tokens=2048,
        page_size=PAGE_SIZE,
        max_num_batched_tokens=128,
        attention_backend=f"{latent},{recurrent}",
        enforce_eager=enforce_eager,
    )
    cached = []
    for prompt in (first, first + end):
        asked: TokensPrompt = {"prompt_token_ids": prompt}
        params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
        [answer] = llm.generate([asked], params, use_tqdm=False)
        tokens = list(answer.outputs[0].token_ids)
        logits = reference_logits(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert bool((logits.max(dim=-1).values - chosen <= SLACK * logits.abs().max()).all())
        cached.append(answer.num_cached_tokens or 0)
    assert cached[0] == 0
    assert cached[1] >= 128
