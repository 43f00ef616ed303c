"""The adapters for Blackwell serve a model that drafts, and the model that checks its drafts, over stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from sightline import LLM, RequestOutput, SamplingParams
from sightline.core import resolution
from support.blackwell_adapters import LATENT_ADAPTERS, Backend, loaded, row_on_cpu
from support.recording_backend import RecordingBackend, install, recording
from support.speculating import ask, tiny
from support.tiny_deepseek import make_wide_deepseek
from support.tiny_models import _common, random_prompts, reference_logits
from support.tiny_mtp import save_model_with_modules

PROMPTS = random_prompts([9, 40])
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
CLOSE = 0.05
"""How far below the best a chosen token's logit may be in half precision, of the largest logit."""

pytestmark = pytest.mark.prove


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    torch.manual_seed(11)
    model, folder = make_wide_deepseek(_common(), num_heads=2), tmp_path_factory.mktemp("wide")
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("name", LATENT_ADAPTERS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"prefix_caching": False, "max_num_batched_tokens": 16}],
    ids=["as it is", "without prefixes, in small chunks"],
)
def test_a_drafter_that_is_the_model_itself_is_nearly_always_right(
    saved: tuple[PreTrainedModel, Path], name: str, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolution, "lacks_products", lambda device, dtype: False)
    model, folder = saved
    with loaded() as adapters:
        install_twice(monkeypatch, adapters[name], name)
        llm = drafted(folder, {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}, changes)
        check_answers(model, ask(llm, GREEDY, PROMPTS))
        metrics = llm.engine.metrics()
        assert metrics.spec_decode_num_accepted_tokens >= 0.7 * metrics.spec_decode_num_draft_tokens > 0
        check_networks(llm)


@pytest.mark.parametrize("name", LATENT_ADAPTERS)
def test_modules_for_multi_token_prediction_draft(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution, "lacks_products", lambda device, dtype: False)
    torch.manual_seed(12)
    model = save_model_with_modules(make_wide_deepseek(_common(), num_heads=2), 1, tmp_path).model
    with loaded() as adapters:
        install_twice(monkeypatch, adapters[name], name)
        llm = drafted(tmp_path, {"method": "mtp"}, {})
        check_answers(model, ask(llm, GREEDY, PROMPTS))
        assert llm.engine.metrics().spec_decode_num_draft_tokens > 0
        check_networks(llm)


def install_twice(monkeypatch: pytest.MonkeyPatch, backend: Backend, name: str) -> None:
    """Makes two recording forms of an adapter known: one for the model, and one for what drafts."""
    rows = (row_on_cpu(name),)
    install(monkeypatch, checking=recording(backend, rows), drafting=recording(backend, rows))


def drafted(folder: Path, speculation: dict[str, object], changes: dict[str, object]) -> LLM:
    return tiny(
        folder,
        dtype="bfloat16",
        page_size=32,
        enforce_eager=True,
        attention_backend="checking",
        speculative_config=speculation | {"attention_backend": "drafting"},
        **changes,
    )


def check_answers(model: PreTrainedModel, outputs: list[RequestOutput]) -> None:
    """Checks that every token is the best one, or as good in half precision, according to transformers."""
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        logits = reference_logits(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert bool((logits.max(dim=-1).values - chosen <= CLOSE * logits.abs().max()).all())


def check_networks(llm: LLM) -> None:
    """Checks that drafts were planned at once, on the adapter."""
    runtime = llm.engine.runtime
    for drafter in runtime.networks[1:]:
        assert drafter.max_rollout > 0
        assert drafter.planner.num_rebuilt == 0
        [backend] = [part.backend for binding in drafter.bindings for part in binding.parts]
        assert isinstance(backend, RecordingBackend)
        assert backend.records
    assert runtime.planner.num_rebuilt == 0
