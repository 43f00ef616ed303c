"""Vectors are the same in whichever way: alone, packed, without a cache, in chunks, with prefixes kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import sightline.engine.embedder
from sightline import LLM
from sightline.attention.backends.torch.backend import TorchBackend
from sightline.attention.backends.torch.latent_backend import TorchLatentBackend
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Work
from sightline.attention.contract import CachePolicy, StepView
from sightline.attention.planner import PlannedBatch
from sightline.cache.pages import PageAllocator
from sightline.core.batch import Batch
from sightline.core.config import EngineConfig
from sightline.core.errors import ConfigError, RequestError, UnsupportedModelError
from sightline.engine.embedder import Embedder
from sightline.engine.text_embedder import TextEmbedder
from support.case_marks import proofs, routine
from support.forged import forged
from support.tiny_bert import (
    CLS,
    POSITIONS,
    SEP,
    VOCAB,
    make_bert,
    open_tiny,
    reference_vector,
    save_embedder,
    vectors,
    write_modules,
    write_tokenizer,
)
from support.tiny_gemma4 import SHARING
from support.tiny_models import FAMILIES, make_model, random_prompts

TOLERANCE = 1e-5
PAGE = 4
LATENT = [family for family in FAMILIES if family.startswith("deepseek")]
TEXTS = random_prompts([1, 30, 7, 7, 2, 19, 13, 8, 9, 16, 17, 30], seed=4)
WHOLE = EngineConfig(max_model_len=48)
PAGED = replace(WHOLE, page_size=PAGE)
CHUNKED = replace(PAGED, max_num_batched_tokens=8, max_num_seqs=3, cache_tokens=128)
KEPT = replace(PAGED, max_num_batched_tokens=16, max_num_seqs=3, cache_tokens=256, prefix_caching=True)
Decoder = tuple[PreTrainedModel, Path]


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Decoder]:
    """A family's model and its folder, made when first asked for."""
    made: dict[str, Decoder] = {}

    def make(family: str) -> Decoder:
        if family not in made:
            model = make_model(family)
            made[family] = (model.model, save_embedder(model, tmp_path_factory.mktemp(family), pooling="lasttoken"))
        return made[family]

    return make


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer, whose every word is a token."""
    folder = save_embedder(make_bert(), tmp_path_factory.mktemp("bert"), max_tokens=20)
    write_tokenizer(folder)
    return folder


def expected(model: PreTrainedModel, texts: Sequence[Sequence[int]], pooling: str = "lasttoken") -> Tensor:
    return torch.stack([reference_vector(model, text, pooling) for text in texts])


def assert_same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


def num_bytes(embedder: TextEmbedder) -> int:
    return sum(pool.num_bytes for pool in embedder.embedder.runtime.store.pools)


def watch(embedder: TextEmbedder, patch: pytest.MonkeyPatch) -> list[PlannedBatch]:
    """Every batch that is planned from here on."""
    planner, planned = embedder.embedder.runtime.planner, list[PlannedBatch]()
    plan = planner.plan

    def recorded(batch: Batch, **options: Any) -> PlannedBatch:
        planned.append(plan(batch, **options))
        return planned[-1]

    patch.setattr(planner, "plan", recorded)
    return planned


@pytest.mark.parametrize(
    "family",
    routine(
        {family: family for family in FAMILIES if family not in SHARING},
        "llama",
        "deepseek_v3",
    ),
)
def test_a_decoders_vectors_are_those_of_transformers_in_every_way(
    decoders: Callable[[str], Decoder], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = decoders(family)
    wanted = expected(model, TEXTS)
    ways = [(WHOLE, CachePolicy.TRANSIENT), (CHUNKED, CachePolicy.PAGED), (KEPT, CachePolicy.PAGED)]
    for config, policy in ways:
        embedder = open_tiny(folder, config)
        planned = watch(embedder, monkeypatch)
        assert_same(vectors(embedder, TEXTS), wanted)
        assert policy in {group.policy for each in planned for group in each.plan.groups}
        assert embedder.embedder.is_transient == (config is WHOLE) == (num_bytes(embedder) == 0)
        if config is KEPT:
            assert {group.policy for each in planned for group in each.plan.groups} == {CachePolicy.PAGED}
            again = embedder.embed_tokens(TEXTS)
            assert_same(torch.stack([each.vector for each in again]), wanted)
            # Its last token is always computed, and only whole pages are kept.
            assert [each.num_cached for each in again] == [(len(text) - 1) // PAGE * PAGE for text in TEXTS]


def test_texts_that_begin_alike_share_what_is_whole_of_it(decoders: Callable[[str], Decoder]) -> None:
    model, folder = decoders("deepseek_v3")
    embedder = open_tiny(folder, KEPT)
    first, other = TEXTS[1], [*TEXTS[1][:10], *TEXTS[5]]
    assert [each.num_cached for each in embedder.embed_tokens([first])] == [0]
    [found] = embedder.embed_tokens([other])
    assert found.num_cached == 8
    assert_same(found.vector[None], expected(model, [other]))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma3"])
@pytest.mark.parametrize("chunk", [3, *proofs(1, 8)])
def test_the_mean_of_a_decoders_states_is_the_same_in_chunks(tmp_path: Path, family: str, chunk: int) -> None:
    model = make_model(family)
    folder = save_embedder(model, tmp_path, pooling="mean")
    config = replace(CHUNKED, max_num_batched_tokens=chunk, max_num_seqs=min(3, chunk))
    wanted = expected(model.model, TEXTS, "mean")
    assert_same(vectors(open_tiny(folder, config), TEXTS), wanted)
    assert_same(vectors(open_tiny(folder, WHOLE), TEXTS), wanted)


def test_a_mean_needs_every_state_and_takes_none_from_the_cache(tmp_path: Path) -> None:
    model = make_model("llama")
    embedder = open_tiny(save_embedder(model, tmp_path, pooling="mean"), KEPT, strict=False)
    assert [(entry.subject, entry.outcome) for entry in embedder.ledger.degradations] == [
        ("prefix_caching", "changes nothing: mean pooling needs the states of all tokens, which are not cached")
    ]
    for _ in range(2):
        found = embedder.embed_tokens(TEXTS)
        assert_same(torch.stack([each.vector for each in found]), expected(model.model, TEXTS, "mean"))
        assert [each.num_cached for each in found] == [0] * len(TEXTS)


Plan = Callable[[Any, StepView, PlanBuffers], Any]


def without_writing(plan: Plan) -> Plan:
    """Reads the cache, and does not write it."""
    return lambda backend, step, buffers: writing_at(plan(backend, step, buffers), None)


def without_reading(plan: Plan) -> Plan:
    """Writes the cache, and computes from the step's own entries alone."""

    def planned(backend: Any, step: StepView, buffers: PlanBuffers) -> Any:
        if step.policy is CachePolicy.TRANSIENT:
            return plan(backend, step, buffers)
        blind = plan(backend, replace(step, policy=CachePolicy.TRANSIENT, batch=without_context(step.batch)), buffers)
        [rows] = step.batch.pools.values()
        return writing_at(blind, rows.write_slots)

    return planned


def writing_at(plan: Any, slots: Tensor | None) -> Any:
    """`plan`, which writes its entries at `slots`: a latent plan leaves that to its coordinator's."""
    kept = getattr(plan, "kept", None)
    return replace(plan, write_slots=slots) if kept is None else replace(plan, kept=replace(kept, new_slots=slots))


def without_context(batch: Batch) -> Batch:
    none = tuple(0 for _ in batch.rows)
    lengths = replace(batch.context_lens, host=none, bound=none, device=torch.zeros_like(batch.context_lens.device))
    return forged(batch, context_lens=lengths)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("family", "backend"), [("llama", "torch"), ("deepseek_v2", "torch-latent"), ("deepseek_v3", "torch-latent")]
)
@pytest.mark.parametrize("mutant", [without_writing, without_reading])
@pytest.mark.parametrize("config", [CHUNKED, KEPT], ids=["chunked", "kept"])
def test_skipping_only_the_write_or_only_the_read_is_caught(
    decoders: Callable[[str], Decoder],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    backend: str,
    mutant: Callable[[Plan], Plan],
    config: EngineConfig,
) -> None:
    _, folder = decoders(family)
    config = replace(config, attention_backend=backend)
    transient = vectors(open_tiny(folder, WHOLE), TEXTS)
    sound = open_tiny(folder, config)
    sound.embed_tokens(TEXTS)
    assert_same(vectors(sound, TEXTS), transient)
    for mutated in (TorchBackend, TorchLatentBackend):
        monkeypatch.setattr(mutated, "plan", mutant(mutated.plan))
    broken = open_tiny(folder, config)
    for pool in broken.embedder.runtime.store.pools:
        # What an earlier text left: numbers, which no check for NaN would see.
        monkeypatch.setattr(pool, "_poison", False)
        for plane in pool.spec.planes:
            pool.plane(plane.name).fill_(0.25)
    broken.embed_tokens(TEXTS)
    errors = (vectors(broken, TEXTS) - transient).abs().amax(dim=1)
    long = [len(text) > PAGE + config.max_num_batched_tokens for text in TEXTS if config.max_num_batched_tokens]
    assert any(long)
    assert bool((errors[torch.tensor(long)] > 100 * TOLERANCE).all()), errors


@pytest.mark.parametrize("config", [WHOLE, replace(WHOLE, max_num_seqs=3), replace(WHOLE, max_num_batched_tokens=64)])
def test_packed_texts_in_any_order_have_the_vectors_that_they_have_alone(tmp_path: Path, config: EngineConfig) -> None:
    embedder = open_tiny(save_embedder(make_bert(), tmp_path), config)
    texts = random_prompts([5, 1, 48, 3, 5, 5, 22, 48, 2, 9, 1, 31], seed=8, vocab=VOCAB)
    alone = torch.cat([vectors(embedder, [text]) for text in texts])
    for seed in range(3):
        order = random.Random(seed).sample(range(len(texts)), len(texts))
        assert_same(vectors(embedder, [texts[index] for index in order]), alone[order])


def test_a_backend_for_decode_that_cannot_serve_here_does_not_keep_texts_from_being_embedded_without_a_cache(
    decoders: Callable[[str], Decoder],
) -> None:
    model, folder = decoders("gemma3")
    config = replace(WHOLE, decode_attention_backend="triton")
    embedder = open_tiny(folder, config, strict=False)
    assert_same(vectors(embedder, TEXTS), expected(model, TEXTS))
    assert [list(binding.serving) for binding in embedder.embedder.runtime.bindings] == [[Work.PREFILL]] * 2
    with pytest.raises(ConfigError, match="triton serves nothing: without a cache no row decodes"):
        open_tiny(folder, config)


def test_steps_hold_whole_texts_side_by_side_by_length_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(max_num_batched_tokens=POSITIONS, max_num_seqs=5)
    embedder = open_tiny(save_embedder(make_bert(), tmp_path), config)
    order = random.Random(0)
    lengths = [order.randint(1, POSITIONS) for _ in range(60)] + [2] * 40
    texts = random_prompts(lengths, vocab=VOCAB)
    planned = watch(embedder, monkeypatch)
    monkeypatch.setattr(PageAllocator, "allocate", None)
    vectors(embedder, texts)
    batches = [each.batch for each in planned]
    assert sum(batch.num_tokens for batch in batches) == sum(lengths)
    packed = [length for batch in batches for length in batch.query_lens.exact()]
    assert packed == sorted(lengths, reverse=True)
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        assert batch.num_tokens <= POSITIONS
        assert batch.num_rows <= 5
        assert not batch.pools
        if following is not None:
            more = batch.num_tokens + following.query_lens.exact()[0]
            assert more > POSITIONS or batch.num_rows == 5, "a step has no place for the next text"


def test_a_step_on_a_cpu_is_no_larger_than_it_gains_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sightline.engine.embedder, "CPU_PACK_TOKENS", 16)
    embedder = open_tiny(save_embedder(make_bert(), tmp_path))
    planned = watch(embedder, monkeypatch)
    vectors(embedder, random_prompts([40, 17, 9, 7, 6, 5, 5], vocab=VOCAB))
    assert [each.batch.query_lens.exact() for each in planned] == [(40,), (17,), (9, 7), (6, 5, 5)]
    assert embedder.embedder.is_transient


def test_a_model_that_is_transient_has_no_pool_and_asks_for_no_page(
    bert: Path, decoders: Callable[[str], Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PageAllocator, "allocate", None)
    for folder, config in ((bert, EngineConfig()), (decoders("deepseek_v3")[1], WHOLE)):
        embedder = open_tiny(folder, config)
        assert embedder.embedder.is_transient
        assert num_bytes(embedder) == 0
        assert len(vectors(embedder, TEXTS[:1])) == 1


def test_short_texts_take_no_pages_where_long_ones_do(
    decoders: Callable[[str], Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = decoders("qwen3")
    embedder = open_tiny(folder, CHUNKED)
    planned = watch(embedder, monkeypatch)
    monkeypatch.setattr(PageAllocator, "allocate", None)
    short = [text for text in TEXTS if len(text) <= 8]
    assert_same(vectors(embedder, short), expected(model, short))
    assert {group.policy for each in planned for group in each.plan.groups} == {CachePolicy.TRANSIENT}


def test_every_page_comes_back_also_after_a_step_that_failed(
    decoders: Callable[[str], Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = decoders("llama")
    embedder = open_tiny(folder, CHUNKED)
    store = embedder.embedder.runtime.store
    before = (store.num_free_pages, store.num_free_rows)
    with monkeypatch.context() as patch:
        patch.setattr(embedder.embedder.runtime.runner, "forward", raise_memory_error)
        with pytest.raises(RequestError, match="could not be embedded: MemoryError"):
            vectors(embedder, TEXTS)
    assert (store.num_free_pages, store.num_free_rows) == before
    assert_same(vectors(embedder, TEXTS), expected(model, TEXTS))
    assert (store.num_free_pages, store.num_free_rows) == before


def raise_memory_error(*_: object) -> Tensor:
    raise MemoryError


def test_states_that_are_no_numbers_are_refused_and_not_kept(
    decoders: Callable[[str], Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = decoders("llama")
    for config in (WHOLE, KEPT):
        embedder = open_tiny(folder, config)
        runner = embedder.embedder.runtime.runner
        forward = runner.forward
        with monkeypatch.context() as patch:
            patch.setattr(runner, "forward", lambda planned, forward=forward: forward(planned) * torch.nan)
            with pytest.raises(RequestError, match="states held a NaN"):
                vectors(embedder, TEXTS)
        found = embedder.embed_tokens(TEXTS[1:2])
        assert found[0].num_cached == 0
        assert_same(found[0].vector[None], expected(model, TEXTS[1:2]))


def test_progress_is_told_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = open_tiny(save_embedder(make_bert(), tmp_path), EngineConfig(max_num_seqs=2))
    planned = watch(embedder, monkeypatch)
    told: list[tuple[int, int]] = []
    embedder.embed(random_prompts([3] * 5, vocab=VOCAB), on_progress=lambda count: told.append((count, len(planned))))
    assert told == [(2, 1), (2, 2), (1, 3)]


def test_memory_stays_as_it_is(bert: Path) -> None:
    embedder = open_tiny(bert)
    workspace = embedder.embedder.runtime.workspace
    before = workspace.num_bytes
    for seed in range(5):
        vectors(embedder, random_prompts([20, 3, 11, 1], seed=seed, vocab=VOCAB))
    assert workspace.num_bytes == before


@pytest.fixture(scope="module")
def llm(bert: Path) -> LLM:
    return LLM(str(bert), task="embed", dtype="float32")


def test_texts_come_back_as_lists_of_numbers_with_their_tokens(llm: LLM) -> None:
    outputs = llm.embed(["w5 w6 w7", {"prompt": "w8"}, {"prompt_token_ids": [CLS, 8, SEP]}], use_tqdm=False)
    assert [output.prompt for output in outputs] == ["w5 w6 w7", "w8", None]
    assert [output.prompt_token_ids for output in outputs] == [(CLS, 5, 6, 7, SEP), (CLS, 8, SEP), (CLS, 8, SEP)]
    assert all(type(number) is float for number in outputs[0].outputs.embedding)
    assert [len(output.outputs.embedding) for output in outputs] == [48] * 3
    torch.testing.assert_close(torch.tensor(outputs[1].outputs.embedding), torch.tensor(outputs[2].outputs.embedding))
    assert {output.num_truncated_tokens for output in outputs} == {0}
    assert len({output.request_id for output in outputs}) == 3
    [single] = llm.embed("w8", use_tqdm=False)
    torch.testing.assert_close(torch.tensor(single.outputs.embedding), torch.tensor(outputs[1].outputs.embedding))
    assert llm.embed([], use_tqdm=False) == []


def test_texts_together_have_the_tokens_that_they_have_alone(llm: LLM) -> None:
    texts = ["", "w5", "[CLS] w6", "w7 [SEP]", "nothing known", "w8 " * 9]
    tokenizer = llm.embedder.tokenizer
    assert tokenizer is not None
    assert [tokens for tokens, _ in llm.embedder.tokens(texts, truncate=False)] == [
        tokenizer.encode_prompt(text) for text in texts
    ]
    with pytest.raises(RequestError, match="expected text of valid Unicode, got a lone surrogate"):
        llm.embed(["w5", "\ud800"], use_tqdm=False)


def test_a_long_text_is_refused_or_cut_before_its_last_special_token(llm: LLM) -> None:
    words = [f"w{index}" for index in range(10, 40)]
    with pytest.raises(RequestError, match="expected a text of 1 to 20 tokens, got 32; shorten it, ask for it to be"):
        llm.embed(" ".join(words), use_tqdm=False)
    [cut] = llm.embed(" ".join(words), truncate=True, use_tqdm=False)
    assert cut.prompt_token_ids == (CLS, *range(10, 28), SEP)
    assert cut.num_truncated_tokens == 12
    [same] = llm.embed(" ".join(words[:18]), use_tqdm=False)
    assert same.num_truncated_tokens == 0
    assert same.outputs.embedding == pytest.approx(cut.outputs.embedding, abs=1e-6)
    [ids] = llm.embed({"prompt_token_ids": list(range(4, 34))}, truncate=True, use_tqdm=False)
    assert ids.prompt_token_ids == tuple(range(4, 24))


def test_the_files_say_how_long_a_text_may_be_unless_the_caller_does(bert: Path) -> None:
    assert open_tiny(bert).max_tokens == 20
    assert open_tiny(bert, EngineConfig(max_model_len=33)).max_tokens == 33
    with pytest.raises(ConfigError, match=f"at most {POSITIONS}, the model's trained positions"):
        open_tiny(bert, EngineConfig(max_model_len=POSITIONS + 1))


def test_fewer_dimensions_are_the_first_ones_at_length_1_again(llm: LLM) -> None:
    [whole], [cut] = (llm.embed("w9 w10", dimensions=count, use_tqdm=False) for count in (None, 7))
    first = torch.tensor(whole.outputs.embedding[:7])
    assert cut.outputs.embedding == pytest.approx((first / first.norm()).tolist(), abs=1e-6)
    [all_of_them] = llm.embed("w9 w10", dimensions=48, use_tqdm=False)
    assert all_of_them.outputs.embedding == pytest.approx(whole.outputs.embedding, abs=1e-6)


@pytest.mark.parametrize("dimensions", [0, -1, 49, True, 7.0])
def test_dimensions_that_a_vector_does_not_have_are_refused(llm: LLM, dimensions: Any) -> None:
    with pytest.raises(RequestError, match=f"expected dimensions from 1 to 48, what a vector has, got {dimensions}"):
        llm.embed("w9", dimensions=dimensions, use_tqdm=False)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([], "expected a text of 1 to 20 tokens, got 0"),
        ([4, -1], "expected token ids from 0 to 96, got -1 at position 1"),
        ([VOCAB], "got 97 at position 0"),
        ([4, 5.0], "got 5.0 at position 1"),
        ([True], "got True at position 0"),
        (["w4"], "got 'w4' at position 0"),
    ],
)
def test_token_ids_that_are_none_are_refused(llm: LLM, ids: list[Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        llm.embed({"prompt_token_ids": ids}, use_tqdm=False)


def test_text_without_a_tokenizer_is_refused(bert: Path) -> None:
    llm = LLM(str(bert), task="embed", skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="expected token ids, got text: the tokenizer was not loaded"):
        llm.embed("w5", use_tqdm=False)


def test_an_encoder_is_never_cached_and_never_cut(bert: Path) -> None:
    with pytest.raises(ConfigError, match="expected no prefix caching of a model whose tokens all see each other"):
        open_tiny(bert, EngineConfig(prefix_caching=True))
    with pytest.raises(ConfigError, match="expected max_num_batched_tokens of at least 20, a whole text, got 19"):
        open_tiny(bert, EngineConfig(max_num_batched_tokens=19))
    assert open_tiny(bert, EngineConfig(max_num_batched_tokens=20)).embedder.is_transient


def test_what_makes_a_decoder_need_the_cache_makes_it_paged(decoders: Callable[[str], Decoder]) -> None:
    _, folder = decoders("deepseek_v2")
    for config in (CHUNKED, KEPT, replace(PAGED, prefix_caching=True), replace(PAGED, max_num_batched_tokens=47)):
        embedder = open_tiny(folder, replace(config, cache_tokens=128, max_num_seqs=2))
        assert not embedder.embedder.is_transient
        assert num_bytes(embedder) > 0
    assert open_tiny(folder, replace(WHOLE, max_num_batched_tokens=48)).embedder.is_transient


def test_the_first_token_of_a_decoder_says_nothing_of_a_text(tmp_path: Path) -> None:
    folder = save_embedder(make_model("llama"), tmp_path, pooling="cls")
    with pytest.raises(
        UnsupportedModelError, match="expected cls pooling of a model whose first token sees the others"
    ):
        open_tiny(folder, WHOLE)


def test_without_files_a_decoders_last_token_and_an_encoders_mean_are_taken_and_it_is_said(tmp_path: Path) -> None:
    cases: list[tuple[PreTrainedModel, PreTrainedModel, str, int]] = []
    llama, encoder = make_model("llama"), make_bert()
    cases = [(llama, llama.model, "lasttoken", 101), (encoder, encoder, "mean", VOCAB)]
    for saved, model, pooling, vocab in cases:
        folder = tmp_path / pooling
        saved.save_pretrained(folder)
        with pytest.raises(ConfigError, match="refused under --strict: pooling"):
            open_tiny(folder, WHOLE)
        embedder = open_tiny(folder, WHOLE, strict=False)
        [entry] = [str(entry) for entry in embedder.ledger]
        assert f"has no modules.json that says how tokens' states become a vector: {pooling}, normalised" in entry
        texts = random_prompts([3, 9], vocab=vocab)
        assert_same(vectors(embedder, texts), expected(model, texts, pooling))


def test_a_model_does_what_its_task_says_and_nothing_else(bert: Path, decoders: Callable[[str], Decoder]) -> None:
    embeds = LLM(str(bert), task="embed")
    with pytest.raises(ConfigError, match="expected a model that generates, got one with task embed; use embed"):
        embeds.generate("w5", use_tqdm=False)
    embeds.close()
    generates = LLM(str(decoders("llama")[1]), skip_tokenizer_init=True, cache_tokens=64)
    with pytest.raises(ConfigError, match=r'got one that generates; use LLM.*task="embed"'):
        generates.embed({"prompt_token_ids": [1]}, use_tqdm=False)
    with pytest.raises(ConfigError, match="expected task generate or embed, got 'classify'"):
        LLM(str(bert), task="classify")
    with pytest.raises(UnsupportedModelError, match="it is an embedding model: use task embed"):
        LLM(str(bert))
    with pytest.raises(ConfigError, match="expected a model to embed with, got none"):
        LLM(task="embed")


def test_vectors_are_not_normalised_where_the_files_do_not_ask(tmp_path: Path) -> None:
    model = make_bert()
    embedder = open_tiny(save_embedder(model, tmp_path, pooling="cls", normalise=False))
    wanted = reference_vector(model, TEXTS[2], "cls", normalise=False)
    torch.testing.assert_close(vectors(embedder, TEXTS[2:3])[0], wanted, atol=1e-5, rtol=1e-5)
    assert abs(float(wanted.norm()) - 1) > 0.1


def test_an_embedder_knows_no_more_of_a_text_than_its_pooling_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_embedder(make_model("llama"), tmp_path, pooling="lasttoken")
    embedder = open_tiny(folder, WHOLE)
    planned = watch(embedder, monkeypatch)
    vectors(embedder, TEXTS)
    assert [len(each.batch.logit_indices) for each in planned] == [each.batch.num_rows for each in planned]
    write_modules(folder, pooling="mean")
    assert isinstance(open_tiny(folder, WHOLE).embedder, Embedder)
