"""Entries in host memory with a buffer of hot ones on the device: no answer changes for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sightline import LLM, RequestOutput
from sightline.core.config import EngineConfig
from sightline.core.errors import ConfigError, NoBackendError
from support.speculating import GREEDY, SAMPLED, SCORED, ask, assert_same_answers, tiny, tokens_of
from support.tiny_models import load_runtime, prompts_alike, random_prompts, stepped_logits
from support.tiny_sparse import TOP_K, make_sparse
from support.tiny_sparse_mtp import SparseOracle

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
PROMPTS = [*random_prompts([5, 33, 21]), [7, 8, 9, 10] * 7]
SHORT = replace(GREEDY, max_tokens=10)
BUFFERS = [TOP_K, 2 * TOP_K, 2048]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sparse")
    make_sparse("deepseek_v32").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def known(folder: Path) -> list[RequestOutput]:
    """The answers with entries on the device, one prompt at a time."""
    llm = tiny(folder, prefix_caching=False, max_num_seqs=1)
    return ask(llm, replace(SCORED, max_tokens=SHORT.max_tokens), PROMPTS)


def hot(folder: Path, buffer: int = TOP_K, top_k: int = TOP_K, **changes: object) -> LLM:
    sizes = {"top_k": top_k, "device_buffer_size": buffer, "host_to_device_ratio": 4}
    return tiny(folder, enable_hisparse=True, hisparse_config=sizes, **{"max_num_seqs": 4, **changes})


def require_copies(llm: LLM) -> None:
    """Entries were looked for, and some had to be copied."""
    metrics = llm.engine.metrics()
    assert 0 < metrics.hisparse_misses <= metrics.hisparse_lookups
    assert metrics.hisparse_host_bytes > 0
    assert metrics.hisparse_device_bytes > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"buffer": TOP_K, "max_num_batched_tokens": 20},
        pytest.param({"buffer": 2 * TOP_K, "max_num_batched_tokens": 7}, marks=pytest.mark.prove),
        pytest.param({"buffer": 2048}, marks=pytest.mark.prove),
        pytest.param({"prefix_caching": False}, marks=pytest.mark.prove),
        pytest.param({"page_size": 1, "layer_kernels": "torch"}, marks=pytest.mark.prove),
        pytest.param({"page_size": 16, "attention_backend": "reference-latent"}, marks=pytest.mark.prove),
        pytest.param({"kv_cache_dtype": "float32", "max_num_batched_tokens": 64}, marks=pytest.mark.prove),
    ],
)
def test_answers_are_those_of_entries_on_the_device(
    folder: Path, known: Sequence[RequestOutput], changes: dict[str, Any]
) -> None:
    llm = hot(folder, **changes)
    assert_same_answers(ask(llm, SHORT, PROMPTS), known)
    # The oracle reads the host itself.
    if changes.get("attention_backend") != "reference-latent":
        require_copies(llm)


@pytest.mark.parametrize("buffer", [TOP_K, pytest.param(3 * TOP_K, marks=pytest.mark.prove)])
def test_guesses_change_no_answer(folder: Path, known: Sequence[RequestOutput], buffer: int) -> None:
    llm = hot(folder, buffer, speculative_config=NGRAM)
    assert_same_answers(ask(llm, SHORT, PROMPTS), known)
    metrics = llm.engine.metrics()
    assert metrics.spec_decode_num_draft_tokens > metrics.spec_decode_num_accepted_tokens
    require_copies(llm)


@pytest.mark.prove
def test_modules_for_multi_token_prediction_have_hot_entries_too(tmp_path: Path) -> None:
    own = SparseOracle("deepseek_v32", 1, tmp_path).folder
    expected = ask(tiny(own), replace(SCORED, max_tokens=SHORT.max_tokens), PROMPTS)
    llm = hot(own, speculative_config={"method": "mtp", "num_speculative_tokens": 3}, max_num_seqs=3)
    assert_same_answers(ask(llm, SHORT, PROMPTS), expected)
    assert any(each.cache.is_on_host for each in llm.engine.runtime.networks[1].coordinators)
    require_copies(llm)


@pytest.mark.prove
def test_trees_of_guesses_change_no_answer(folder: Path, known: Sequence[RequestOutput]) -> None:
    llm = hot(folder, speculative_config=NGRAM | {"num_branches": 2})
    assert_same_answers(ask(llm, SHORT, PROMPTS), known)


@pytest.mark.parametrize("buffer", [TOP_K, pytest.param(2 * TOP_K, marks=pytest.mark.prove)])
def test_sequences_that_give_way_and_prefixes_that_are_shared_change_no_answer(folder: Path, buffer: int) -> None:
    """The cache is too small for all of them: rows are retracted, and others take their place."""
    prompts = prompts_alike(22, 6, 5)
    plain = tiny(folder, prefix_caching=False, max_num_seqs=1)
    expected = ask(plain, replace(SCORED, max_tokens=12), prompts)
    llm = hot(folder, buffer, cache_tokens=96, max_model_len=48)
    for _ in range(2):
        assert_same_answers(ask(llm, replace(GREEDY, max_tokens=12), prompts), expected)
    metrics = llm.engine.metrics()
    assert metrics.num_preemptions > 0
    assert metrics.prefix_cache_hits > 0


@pytest.mark.prove
def test_several_continuations_of_a_prompt_are_those_of_entries_on_the_device(folder: Path) -> None:
    params = replace(SAMPLED, n=3, max_tokens=10)
    expected = ask(tiny(folder, max_num_seqs=4), params, PROMPTS[:2])
    assert tokens_of(ask(hot(folder), params, PROMPTS[:2])) == tokens_of(expected)


@pytest.mark.prove
def test_requests_that_are_given_up_leave_nothing_hot_for_others(folder: Path, known: Sequence[RequestOutput]) -> None:
    llm = hot(folder, max_num_seqs=2)
    for number in range(3):
        request = llm.engine.submit(random_prompts([30], seed=number)[0], SHORT)
        for _ in range(4 + number):
            llm.engine.step()
        llm.engine.cancel(request)
    assert_same_answers(ask(llm, SHORT, PROMPTS), known)


V4_TOP_K = 6
"""Entries of 4 tokens."""
V4_PROMPTS = [*random_prompts([5, 47, 30]), [7, 8, 9, 10] * 9]


def hot_v4(folders: Callable[[str], Path], buffer: int = V4_TOP_K, **changes: object) -> LLM:
    return hot(folders("deepseek_v4"), buffer, V4_TOP_K, **{"max_num_seqs": 3, **changes})


@pytest.fixture(scope="module")
def known_v4(folders: Callable[[str], Path]) -> list[RequestOutput]:
    """The answers of DeepSeek V4 with entries on the device, one prompt at a time."""
    llm = tiny(folders("deepseek_v4"), prefix_caching=False, max_num_seqs=1)
    return ask(llm, replace(SCORED, max_tokens=12), V4_PROMPTS)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 22, "speculative_config": NGRAM},
        pytest.param({"buffer": 2 * V4_TOP_K, "max_num_batched_tokens": 7}, marks=pytest.mark.prove),
        pytest.param({"buffer": 512, "async_scheduling": True}, marks=pytest.mark.prove),
        pytest.param({"prefix_caching": False, "paranoid": True}, marks=pytest.mark.prove),
        pytest.param({"page_size": 1, "buffer": 13, "speculative_config": NGRAM}, marks=pytest.mark.prove),
        pytest.param({"page_size": 16, "attention_backend": "reference-compressed"}, marks=pytest.mark.prove),
    ],
)
def test_answers_of_entries_of_several_tokens_are_those_of_entries_on_the_device(
    folders: Callable[[str], Path], known_v4: Sequence[RequestOutput], changes: dict[str, Any]
) -> None:
    llm = hot_v4(folders, **changes)
    for _ in range(2):
        # The second time the cache has the prompts' prefixes.
        assert_same_answers(ask(llm, replace(GREEDY, max_tokens=12), V4_PROMPTS), known_v4)
    coordinators = llm.engine.runtime.coordinators
    assert [each.cache.is_on_host for each in coordinators] == [False, True, False, False]
    # Entries of 16 elements, in two layers.
    entries = llm.engine.runtime.config.cache_tokens // 4
    assert llm.engine.metrics().hisparse_host_bytes >= 2 * 16 * 4 * entries
    if changes.get("attention_backend") is None:
        require_copies(llm)


@pytest.mark.parametrize("buffer", [V4_TOP_K, pytest.param(3 * V4_TOP_K, marks=pytest.mark.prove)])
def test_rows_of_entries_of_several_tokens_that_give_way_change_no_answer(
    folders: Callable[[str], Path], buffer: int
) -> None:
    prompts = prompts_alike(30, 4, 5)
    plain = tiny(folders("deepseek_v4"), prefix_caching=False, max_num_seqs=1)
    expected = ask(plain, replace(SCORED, max_tokens=12), prompts)
    llm = hot_v4(folders, buffer, cache_tokens=112, max_model_len=56)
    for _ in range(2):
        assert_same_answers(ask(llm, replace(GREEDY, max_tokens=12), prompts), expected)
    metrics = llm.engine.metrics()
    assert metrics.num_preemptions > 0
    assert metrics.prefix_cache_hits > 0
    require_copies(llm)


@pytest.mark.prove
def test_several_continuations_of_entries_of_several_tokens(folders: Callable[[str], Path]) -> None:
    params = replace(SAMPLED, n=3, max_tokens=10)
    expected = ask(tiny(folders("deepseek_v4"), max_num_seqs=4), params, V4_PROMPTS[:2])
    assert tokens_of(ask(hot_v4(folders, max_num_seqs=4), params, V4_PROMPTS[:2])) == tokens_of(expected)


@pytest.mark.parametrize("buffer", [TOP_K, pytest.param(2 * TOP_K, marks=pytest.mark.prove)])
def test_logits_are_those_of_entries_on_the_device(folder: Path, buffer: int) -> None:
    def logits(**settings: Any) -> list[torch.Tensor]:
        config = EngineConfig(page_size=4, dtype="float32", cache_tokens=512, max_num_seqs=4, **settings)
        runtime = load_runtime(folder, config, strict=False)
        return stepped_logits(runtime, random_prompts([14, 50, 33]), (10, 40, 20), 17)

    found = logits(enable_hisparse=True, hisparse_config={"device_buffer_size": buffer})
    for got, expected in zip(found, logits(), strict=True):
        # Tokens are computed in other turns, which round differently.
        assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hisparse_config": {"device_buffer_size": TOP_K - 1}}, f"device_buffer_size of at least {TOP_K}"),
        ({"hisparse_config": '{"top_k": 64, "device_buffer_size": 63}'}, "device_buffer_size of at least 64"),
        ({"hisparse_config": {"top_k": TOP_K + 1}}, f"expected top_k {TOP_K} in hisparse_config"),
        ({"hisparse_config": {"buffer": 64}}, "buffer"),
        ({"hisparse_config": "{"}, "hisparse_config as JSON"),
        ({"hisparse_config": [1]}, "expected hisparse_config such as"),
        ({"hisparse_config": {"host_to_device_ratio": 0.5}}, "host_to_device_ratio"),
        ({"enable_hisparse": False, "hisparse_config": {"top_k": 64}}, "expected enable_hisparse"),
        ({"attention_backend": "triton-latent"}, "triton-latent"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_start(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(folder, **{"enable_hisparse": True, "max_num_seqs": 2, **settings})


def test_a_model_whose_layers_choose_nothing_is_refused(folders: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="expected a model whose layers attend to chosen entries"):
        tiny(folders("llama"), enable_hisparse=True)


def test_a_backend_that_reads_the_device_alone_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(NoBackendError, match="does not read entries in host memory"):
        tiny(folder, enable_hisparse=True, max_num_seqs=2, attention_backend="numba-latent")
