"""Guessing on a GPU: drafts and verification are captured, and answers are those without guesses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sightline import LLM
from support.eagle3_heads import CASES, make_weights, save_head
from support.eagle3_runs import make_target
from support.speculating import EVERYTHING, GREEDY, PROMPTS, ask, tiny, tokens_of
from support.tiny_models import make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SMALL = {"device": "cuda", "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}


def saved(family: str, folder: Path) -> Path:
    make_model(family).save_pretrained(folder)
    return folder


def drafted_by_itself(folder: Path) -> tuple[Path, dict[str, object]]:
    saved("llama", folder)
    return folder, {"method": "draft_model", "model": str(folder)}


def drafted_by_a_head(folder: Path) -> tuple[Path, dict[str, object]]:
    target, head = folder / "target", folder / "head"
    for each in (target, head):
        each.mkdir()
    model, case = make_target(), CASES["plain"]
    model.save_pretrained(target)
    save_head(case, head, make_weights(case))
    return target, {"method": "eagle3", "model": str(head)}


def drafted_by_modules(folder: Path) -> tuple[Path, dict[str, object]]:
    pytest.importorskip("transformers", minversion="5.20", reason="modules need MtpModel")
    from support.tiny_mtp import save_with_modules

    save_with_modules("deepseek_v3", 2, folder)
    return folder, {"method": "mtp"}


def drafted_by_its_text(folder: Path) -> tuple[Path, dict[str, object]]:
    saved("gemma3", folder)
    return folder, {"method": "ngram", "prompt_lookup_min": 1}


def drafted_in_branches(folder: Path) -> tuple[Path, dict[str, object]]:
    saved("llama", folder)
    return folder, {"method": "ngram", "prompt_lookup_min": 1, "num_branches": 3}


def drafted_from_its_cache(folder: Path) -> tuple[Path, dict[str, object]]:
    pytest.importorskip("transformers.models.gemma4_assistant", reason="the assistant needs transformers' own")
    from support.tiny_assistant import make_assistant

    target = make_model("gemma4")
    target.save_pretrained(folder / "target")
    make_assistant(target).save_pretrained(folder / "assistant")
    return folder / "target", {"method": "frozen_kv_mtp", "model": str(folder / "assistant")}


EAGER = (drafted_in_branches, drafted_from_its_cache)
"""Trees of guesses, and networks without a cache, are not captured."""


@pytest.mark.parametrize(
    "make",
    [drafted_by_itself, drafted_by_a_head, drafted_by_modules, drafted_by_its_text, *EAGER],
    ids=lambda make: make.__name__,
)
def test_answers_are_those_without_guesses_and_steps_are_replayed(
    tmp_path: Path, make: Callable[[Path], tuple[Path, dict[str, object]]]
) -> None:
    folder, config = make(tmp_path)
    expected = ask(tiny(folder, **SMALL), EVERYTHING, PROMPTS)
    llm: LLM = tiny(folder, speculative_config=config, **SMALL)
    assert tokens_of(ask(llm, EVERYTHING, PROMPTS)) == tokens_of(expected)
    runtime, metrics = llm.engine.runtime, llm.engine.metrics()
    assert metrics.spec_decode_num_draft_tokens > (0 if make is drafted_in_branches else 50)
    assert not [each for each in llm.engine.ledger.degradations if each.subject == "speculative_config"]
    if make not in EAGER:
        assert runtime.runner.num_replayed > metrics.steps // 2
        assert all(network.runner.num_replayed > 0 for network in runtime.draft.networks)
    if config["method"] == "draft_model":
        llm.engine.reset_counts()
        ask(llm, GREEDY, PROMPTS)
        metrics = llm.engine.metrics()
        assert metrics.spec_decode_num_accepted_tokens > 0.95 * metrics.spec_decode_num_draft_tokens
