"""Pinned host memory on a GPU: pages go there and come back in stream order, and answers are those without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sightline import LLM
from sightline.cache.blocks import BlockHash, BlockPlace, TransferDone, hash_after
from sightline.cache.host import HostBlocks
from support.engines import is_at_rest
from support.hybrids import HYBRIDS, make_hybrid
from support.speculating import GREEDY, PAGE, SCORED, ask, assert_same_answers, tiny
from support.tiny_models import make_model, prompts_alike, random_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LITTLE = {"device": "cuda", "cache_tokens": 64, "max_model_len": 48, "max_num_seqs": 3, "max_num_batched_tokens": 64}
ROUNDS = [prompts_alike(22, 3, 5), random_prompts([22, 20, 21], seed=1)] * 3


def saved(family: str, folder: Path) -> Path:
    make = make_hybrid if family in HYBRIDS else make_model
    make(family).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "overlapping"])
def test_a_small_cache_gets_its_pages_back_and_answers_alike(tmp_path: Path, family: str, overlaps: bool) -> None:
    folder = saved(family, tmp_path)
    # Both end a prompt of 27 tokens at the same length.
    alone = LITTLE | {"cache_tokens": 1024, "max_num_seqs": 1}
    plain = tiny(folder, **alone, prefix_caching=False)
    llm: LLM = tiny(folder, **LITTLE, host_cache_gib=8 / 1024, async_scheduling=overlaps)
    for prompts in ROUNDS:
        assert_same_answers(ask(llm, GREEDY, prompts), ask(plain, SCORED, prompts))
    metrics = llm.engine.metrics()
    assert metrics.host_cache_returns > 0
    assert metrics.host_cache_failures == 0
    assert is_at_rest(llm)
    llm.engine.close()


def test_a_page_that_is_put_and_overwritten_at_once_comes_back_as_it_was(tmp_path: Path) -> None:
    """The host waits for nothing: the copies are right because they are in stream order."""
    llm: LLM = tiny(saved("llama", tmp_path), **LITTLE, host_cache_gib=8 / 1024)
    store = llm.engine.runtime.store
    blocks = HostBlocks(store, 1 << 20)
    assert blocks._entries.row(0).is_pinned()
    planes = [pool.plane(plane.name) for pool in store.pools for plane in pool.spec.planes]
    first, other = slice(PAGE, 2 * PAGE), slice(5 * PAGE, 6 * PAGE)
    name, pages = BlockHash(b"root"), len(store.pools)
    for number in range(50):
        name = hash_after(name, b"page")
        for plane in planes:
            plane[:, first] = number
        blocks.put([name], [BlockPlace((1,) * pages)])
        for plane in planes:
            plane[:, first] = -1
        blocks.fetch([name], [BlockPlace((5,) * pages)])
        assert [end for _, end in blocks.poll()] == [TransferDone(), TransferDone()]
        assert all(bool((plane[:, other] == number).all()) for plane in planes)
    blocks.close()
