"""A network that drafts changes how many steps an answer takes, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from sightline import LLM
from sightline.core.errors import ConfigError
from sightline.engine.engine import Engine
from sightline.speculative.drafts import AdaptiveDrafts
from support.case_marks import proofs
from support.engines import is_at_rest
from support.speculating import EVERYTHING, GREEDY, PAGE, PROMPTS, SAMPLED, ask, tiny, tokens_of
from support.tiny_models import make_model, random_prompts

Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def nearly(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that often, but not always, says what the tiny llama says."""
    folder = tmp_path_factory.mktemp("nearly")
    model = make_model("llama")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.add_(0.05 * weight.std() * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def drafted(folder: Path, drafter: Path, **changes: object) -> LLM:
    return tiny(folder, speculative_config={"method": "draft_model", "model": str(drafter)}, **changes)


def share(engine: Engine) -> float:
    """How many guesses were right."""
    metrics = engine.metrics()
    assert metrics.spec_decode_num_draft_tokens > 0
    assert not [each for each in engine.ledger.degradations if each.subject == "speculative_config"]
    return metrics.spec_decode_num_accepted_tokens / metrics.spec_decode_num_draft_tokens


@pytest.mark.parametrize("family", ["llama", *proofs("gemma2", "gemma3", "gpt_oss", "qwen3_moe"), "deepseek_v3"])
def test_answers_are_those_without_a_drafter(folders: Folders, family: str) -> None:
    expected = ask(tiny(folders(family)), EVERYTHING, PROMPTS)
    llm = drafted(folders(family), folders("llama"))
    assert tokens_of(ask(llm, EVERYTHING, PROMPTS)) == tokens_of(expected)
    assert share(llm.engine) >= 0.0


@pytest.mark.parametrize("family", ["llama", *proofs("deepseek_v3", "gemma3")])
def test_a_drafter_that_is_the_model_itself_is_always_right(folders: Folders, family: str) -> None:
    params = replace(GREEDY, max_tokens=40)
    expected = ask(tiny(folders(family)), params, PROMPTS)
    llm = drafted(folders(family), folders(family))
    assert tokens_of(ask(llm, params, PROMPTS)) == tokens_of(expected)
    assert share(llm.engine) > 0.99
    again = ask(llm, params, PROMPTS)
    assert tokens_of(again) == tokens_of(expected)
    assert min(each.num_cached_tokens for each in again[1:2]) > 0, "its entries are shared with the model's"
    assert share(llm.engine) > 0.99, "also behind a prefix that was found"


def test_guesses_for_sampled_answers_are_drawn_with_the_same_noise(folders: Folders) -> None:
    """A drafter that is the model itself draws what the model draws, at any temperature."""
    for params in (SAMPLED, replace(SAMPLED, temperature=0.7, top_p=0.9), replace(SAMPLED, top_k=20, min_p=0.02, n=2)):
        expected = ask(tiny(folders("llama")), params, PROMPTS[:2])
        llm = drafted(folders("llama"), folders("llama"))
        assert tokens_of(ask(llm, params, PROMPTS[:2])) == tokens_of(expected)
        assert share(llm.engine) > 0.99


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_tokens": 72, "max_model_len": 64, "max_num_seqs": 5},
        {"max_num_batched_tokens": 5, "max_num_seqs": 3},
        {"prefix_caching": False},
        {"max_model_len": 48},
        {"attention_backend": "torch", "layer_kernels": "torch"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_room_and_sizes_change_nothing(folders: Folders, nearly: Path, changes: dict[str, object]) -> None:
    expected = ask(tiny(folders("llama"), **changes), GREEDY, PROMPTS)
    llm = drafted(folders("llama"), nearly, **changes)
    assert tokens_of(ask(llm, GREEDY, PROMPTS)) == tokens_of(expected)
    assert 0.2 < share(llm.engine) < 1.0
    if "cache_tokens" in changes:
        assert llm.engine.num_retractions > 0


@pytest.mark.parametrize("max_tokens", [1, 8, 39, *proofs(2, 7, 9)])
def test_a_draft_ends_with_the_context(folders: Folders, max_tokens: int) -> None:
    params = replace(GREEDY, max_tokens=max_tokens)
    expected = ask(tiny(folders("llama"), max_model_len=48), params, PROMPTS[:1])
    llm = drafted(folders("llama"), folders("llama"), max_model_len=48)
    assert tokens_of(ask(llm, params, PROMPTS[:1])) == tokens_of(expected)


def test_requests_that_are_cancelled_leave_the_others_alone(folders: Folders, nearly: Path) -> None:
    expected = ask(tiny(folders("llama")), GREEDY, PROMPTS)
    llm, random = drafted(folders("llama"), nearly), Random(5)
    engine = llm.engine
    for _ in range(8):
        asked = {engine.submit(prompt, GREEDY): index for index, prompt in enumerate(PROMPTS)}
        gone = set(random.sample(sorted(asked), 2))
        while not all(engine.is_finished(each) for each in asked):
            if random.random() < 0.3:
                engine.cancel(random.choice(sorted(gone)))
            engine.step()
        for each, index in asked.items():
            found, whole = engine.pop_output(each).outputs[0].token_ids, expected[index].outputs[0].token_ids
            assert found == whole[: len(found)]
            assert each in gone or found == whole
    assert share(engine) > 0.2
    assert is_at_rest(llm)


def test_a_prompt_is_shared_only_when_the_drafter_has_computed_it_too(folders: Folders, nearly: Path) -> None:
    llm = drafted(folders("llama"), nearly)
    [prompt] = [PROMPTS[3]]
    ask(llm, replace(GREEDY, max_tokens=1), [prompt])
    [found] = ask(llm, replace(GREEDY, max_tokens=1), [prompt])
    assert found.num_cached_tokens == (len(prompt) - 1) // PAGE * PAGE


def test_a_drafter_that_fails_costs_nobody_an_answer(
    folders: Folders, nearly: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ask(tiny(folders("llama")), GREEDY, PROMPTS)
    llm = drafted(folders("llama"), nearly)
    runner, calls = llm.engine.runtime.draft.networks[0].runner, 0
    forward = runner.forward

    def failing(*args: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise RuntimeError("out of luck")
        return forward(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "forward", failing)
    assert tokens_of(ask(llm, GREEDY, PROMPTS)) == tokens_of(expected)
    [told] = [each for each in llm.engine.ledger.degradations if each.subject == "speculative_config"]
    assert "out of luck" in str(told)
    prompts = random_prompts([13, 22], seed=5)
    for num_cached in ([0, 0], [12, 20]):
        found = [each.num_cached_tokens for each in ask(llm, GREEDY, prompts)]
        assert found == num_cached, "prefixes are shared without it"


def test_a_draft_that_was_interrupted_counts_for_no_other_row(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text repeats one token, so that the tokens of the draft are those behind any place."""
    monkeypatch.setattr(AdaptiveDrafts, "limit", lambda drafts, _: drafts._most)
    llm = drafted(folders("llama"), folders("llama"), prefix_caching=False)
    engine, params = llm.engine, replace(GREEDY, logit_bias={7: 100.0})
    [expected] = ask(llm, params, [[7] * 9])
    asked = engine.submit([7] * 9, params)
    for _ in range(3):
        engine.step()
    forward = engine.runtime.runner.forward

    def interrupted(*_: object) -> torch.Tensor:
        monkeypatch.setattr(engine.runtime.runner, "forward", forward)
        raise KeyboardInterrupt

    def interrupt() -> None:
        monkeypatch.setattr(engine.runtime.runner, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()

    interrupt()
    engine.pause(asked)
    engine.resume(asked)
    while not engine.is_finished(asked):
        engine.step()
    assert engine.pop_output(asked).outputs[0].token_ids == expected.outputs[0].token_ids
    assert share(engine) >= 0.0
    asked = engine.submit([7] * 9, params)
    for _ in range(3):
        engine.step()
    interrupt()
    engine.forget(asked)
    engine.step()
    assert is_at_rest(llm), "nothing is kept of a draft whose sequence ended first"


def test_a_drafter_with_other_tokens_is_refused(folders: Folders, tmp_path: Path) -> None:
    model = make_model("llama")
    model.resize_token_embeddings(model.config.vocab_size + 8)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="tokens of the model"):
        drafted(folders("llama"), tmp_path)


def test_a_drafter_honours_the_backend_flag_and_has_its_own(folders: Folders) -> None:
    config = {"method": "draft_model", "model": str(folders("llama"))}

    def chosen(**changes: object) -> list[set[str]]:
        own = {"speculative_config": config | changes.pop("draft", {})}  # type: ignore[operator]
        networks = tiny(folders("llama"), **own, **changes).engine.runtime.networks
        return [{each.candidate.name for part in network.selections for each in part.values()} for network in networks]

    assert chosen(attention_backend="torch") == [{"torch"}, {"torch"}]
    assert chosen(attention_backend="torch", draft={"attention_backend": "reference"}) == [{"torch"}, {"reference"}]
    with pytest.raises(ConfigError, match="nonsense"):
        chosen(draft={"attention_backend": "nonsense"})
