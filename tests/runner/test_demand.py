"""What an engine says that it will ask of attention holds everything that it does ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from sightline import LLM, SamplingParams
from sightline.attention.capability import Work
from sightline.attention.compressed.spec import CompressedSpec, Compression
from sightline.attention.contract import CachePolicy
from sightline.attention.coverage import Demand
from sightline.attention.dimensions import Company, Dimension, KeptStates, Reuse, Sharing, Span
from sightline.attention.groups import LayerGroup, Loan
from sightline.attention.kinds import Feature
from sightline.attention.spec import LatentSpec, RecurrentSpec, SoftmaxSpec
from sightline.cache.layout import Layout
from sightline.core.config import Quantization
from sightline.core.device import detect_device
from sightline.core.resolution import ResolvedConfig
from sightline.core.speculation import Speculation
from sightline.llm import EngineSettings, TokensPrompt
from sightline.runner.backend_choice import works_of
from sightline.runner.demand import PAGE_ORDERS, AttentionUsage, demands_of, requirement
from sightline.runner.runtime import Runtime
from support.case_marks import routine
from support.observed import Observed, ObservingBackend, holds
from support.recording_backend import install
from support.tiny_bert import VOCAB, make_bert, save_embedder
from support.tiny_models import make_model, random_prompts

CONFIG = ResolvedConfig(
    device=detect_device("cpu"),
    dtype=torch.bfloat16,
    cache_dtype=torch.float16,
    quantization=Quantization.DEQUANTISE,
    max_model_len=1000,
    max_rows=64,
    max_step_tokens=512,
    page_size=16,
    num_pages=101,
    scratch_bytes=1 << 20,
    prefix_caching=True,
    max_queued=1,
    async_scheduling=False,
    attention_backend=None,
    prefill_attention_backend=None,
    decode_attention_backend=None,
    seed=None,
    paranoid=False,
    require_proof=False,
)
OF_STATES = {
    Dimension.VALUE_DIM,
    Dimension.CONV_WIDTH,
    Dimension.UNIT_KEYS,
    Dimension.KEPT,
    Dimension.SLOT_ORDER,
}
OF_CHOICES = {Dimension.TOP_K, Dimension.RATIO, Dimension.OVERLAP}
HYBRID = replace(CONFIG, states_per_row=3, max_checkpoints=40)
RECURRENT_GROUP = LayerGroup(
    "group1",
    RecurrentSpec(4, 2, 64, 32, 0.125, delta_rule=True, channel_decay=False, unit_keys=True, conv_width=4),
    (1, 3),
)
GROUP = LayerGroup("group0", SoftmaxSpec(6, 2, 64, 0.125, window=20, sinks=True), (0, 2, 4))


def only(
    config: ResolvedConfig, work: Work, usage: AttentionUsage = AttentionUsage.GENERATE, group: LayerGroup = GROUP
) -> Demand:
    [demand] = demands_of(config, group, work, usage)
    return demand


def test_a_demand_is_what_the_config_and_the_group_say() -> None:
    demand = only(CONFIG, Work.PREFILL)
    assert demand.scales == {
        Dimension.ROWS: Span(1, 64),
        Dimension.NEW_TOKENS: Span(1, 512),
        Dimension.CONTEXT: Span(0, 999),
        Dimension.STEP_TOKENS: Span(1, 512),
        Dimension.LAYERS: Span(3, 3),
        Dimension.KEY_HEADS: Span(2, 2),
        Dimension.WINDOW: Span(20, 20),
        Dimension.POOL_SLOTS: Span(1616, 1616),
    }
    assert demand.values == {
        Dimension.KIND: {"softmax"},
        Dimension.GROUP_SIZE: {3},
        Dimension.HEAD_DIM: {64},
        Dimension.PAGE_SIZE: {16},
        Dimension.DTYPE: {"bfloat16"},
        Dimension.CACHE_DTYPE: {"float16"},
        Dimension.FEATURES: {"sinks+window"},
        Dimension.MASK: {"causal"},
        Dimension.POLICY: {"paged"},
        Dimension.SHARING: {"none", "prefix"},
        Dimension.PAGE_ORDER: {"in order", "shuffled", "descending"},
        Dimension.PADDING: {"none"},
        Dimension.REUSE: {each.value for each in Reuse},
        Dimension.COMPANY: {each.value for each in Company},
        Dimension.LANE: {"main"},
    }
    assert {*demand.scales, *demand.values} == set(Dimension) - OF_STATES - OF_CHOICES


def test_a_recurrent_group_demands_states_and_no_pages() -> None:
    demand = only(HYBRID, Work.PREFILL, group=RECURRENT_GROUP)
    assert demand.scales == {
        Dimension.ROWS: Span(1, 64),
        Dimension.NEW_TOKENS: Span(1, 512),
        Dimension.CONTEXT: Span(0, 999),
        Dimension.STEP_TOKENS: Span(1, 512),
        Dimension.LAYERS: Span(2, 2),
        Dimension.KEY_HEADS: Span(2, 2),
    }
    assert demand.values == {
        Dimension.KIND: {"recurrent"},
        Dimension.GROUP_SIZE: {2},
        Dimension.HEAD_DIM: {64},
        Dimension.VALUE_DIM: {32},
        Dimension.CONV_WIDTH: {4},
        Dimension.UNIT_KEYS: {1},
        Dimension.DTYPE: {"bfloat16"},
        Dimension.FEATURES: {"delta-rule"},
        Dimension.MASK: {"causal"},
        Dimension.POLICY: {"paged"},
        Dimension.KEPT: {"of last tokens", "checkpoints"},
        Dimension.SLOT_ORDER: {"in order", "shuffled", "descending"},
        Dimension.PADDING: {"none"},
        Dimension.REUSE: {each.value for each in Reuse},
        Dimension.COMPANY: {each.value for each in Company},
        Dimension.LANE: {"main"},
    }


def test_a_compressed_group_demands_pages_and_states() -> None:
    compression = Compression(4, overlap=True, rope_dim=64, norm_eps=1e-6)
    group = LayerGroup("group1", CompressedSpec(6, 128, 0.1, 20, compression, 8), (1, 3))
    demand = only(HYBRID, Work.PREFILL, group=group)
    paged, recurrent = only(HYBRID, Work.PREFILL), only(HYBRID, Work.PREFILL, group=RECURRENT_GROUP)
    assert {*demand.scales} == {*paged.scales}
    assert demand.values == {
        **paged.values,
        **{each: recurrent.values[each] for each in (Dimension.KEPT, Dimension.SLOT_ORDER)},
        Dimension.KIND: {"compressed"},
        Dimension.GROUP_SIZE: {6},
        Dimension.HEAD_DIM: {128},
        Dimension.FEATURES: {"sparse+window"},
        Dimension.TOP_K: {8},
        Dimension.RATIO: {4},
        Dimension.OVERLAP: {1},
    }
    assert requirement(HYBRID, group, Work.PREFILL, AttentionUsage.GENERATE).cache_dtype is CONFIG.cache_dtype


@pytest.mark.parametrize("work", [Work.DECODE, Work.FEW, Work.ALONE], ids=lambda work: work.value)
def test_rows_of_one_token_keep_one_state(work: Work) -> None:
    assert only(HYBRID, work, group=RECURRENT_GROUP).values[Dimension.KEPT] == {"of last tokens"}


def test_without_checkpoints_none_are_demanded() -> None:
    config = replace(HYBRID, max_checkpoints=0)
    assert only(config, Work.PREFILL, group=RECURRENT_GROUP).values[Dimension.KEPT] == {"of last tokens"}


def test_guesses_keep_their_states() -> None:
    config = replace(HYBRID, speculation=Speculation())
    demand = only(config, Work.PREFILL, group=RECURRENT_GROUP)
    assert demand.values[Dimension.KEPT] == {each.value for each in KeptStates}


def test_page_orders_are_those_of_the_kit() -> None:
    assert set(PAGE_ORDERS) == {layout.value for layout in Layout}


@pytest.mark.parametrize(
    ("work", "rows"), [(Work.DECODE, Span(9, 64)), (Work.FEW, Span(2, 8)), (Work.ALONE, Span(1, 1))]
)
def test_rows_that_decode_have_one_token_each_and_come_in_their_numbers(work: Work, rows: Span) -> None:
    demand = only(CONFIG, work)
    assert demand.scales[Dimension.ROWS] == demand.scales[Dimension.STEP_TOKENS] == rows
    assert demand.scales[Dimension.NEW_TOKENS] == Span(1, 1)
    assert (Company.ALONE.value in demand.values[Dimension.COMPANY]) == (rows.low == 1)
    assert (Sharing.PREFIX.value in demand.values[Dimension.SHARING]) == (rows.high > 1)


def test_few_rows_are_no_more_than_there_can_be() -> None:
    assert only(replace(CONFIG, max_rows=3), Work.FEW).scales[Dimension.ROWS] == Span(2, 3)


def test_nothing_is_shared_where_no_page_is_ever_whole_or_where_texts_are_embedded_and_not_kept() -> None:
    plain, short = replace(CONFIG, prefix_caching=False), replace(CONFIG, max_model_len=16)
    for demand in demands_of(short, GROUP, Work.PREFILL, AttentionUsage.GENERATE):
        assert demand.values[Dimension.SHARING] == {Sharing.NONE.value}
    assert demands_of(plain, GROUP, Work.PREFILL, AttentionUsage.EMBED)[0].values[Dimension.SHARING] == {
        Sharing.NONE.value
    }
    assert only(plain, Work.PREFILL).values[Dimension.SHARING] == {each.value for each in Sharing}


def test_a_row_has_no_more_new_tokens_than_a_sequence_and_a_step_of_one_row_no_more_than_the_row() -> None:
    alone, beside = demands_of(replace(CONFIG, max_model_len=100), GROUP, Work.PREFILL, AttentionUsage.GENERATE)
    assert alone.scales[Dimension.NEW_TOKENS] == beside.scales[Dimension.NEW_TOKENS] == Span(1, 100)
    assert (alone.scales[Dimension.ROWS], alone.scales[Dimension.STEP_TOKENS]) == (Span(1, 1), Span(1, 100))
    assert (beside.scales[Dimension.ROWS], beside.scales[Dimension.STEP_TOKENS]) == (Span(2, 64), Span(2, 512))
    assert alone.values[Dimension.COMPANY] == {Company.ALONE.value}
    assert alone.values[Dimension.SHARING] == {Sharing.NONE.value}
    assert beside.values[Dimension.COMPANY] == {each.value for each in Company} - {Company.ALONE.value}
    few = demands_of(replace(CONFIG, max_model_len=100, max_rows=3), GROUP, Work.PREFILL, AttentionUsage.GENERATE)
    assert few[1].scales[Dimension.STEP_TOKENS] == Span(2, 300)


def test_a_group_that_borrows_is_asked_for_that_and_for_what_it_needs() -> None:
    group = replace(GROUP, loan=Loan("group1", (1, 0, 2)))
    assert only(CONFIG, Work.PREFILL, group=group).values[Dimension.POLICY] == {CachePolicy.BORROWED.value}
    assert only(CONFIG, Work.PREFILL).values[Dimension.POLICY] == {CachePolicy.PAGED.value}
    assert not GROUP.needs
    assert group.needs == {Feature.SHARED_CACHE}


def test_latent_attention_has_one_key_head_and_no_window() -> None:
    group = LayerGroup("group0", LatentSpec(16, 512, 64, 128, 128, 0.1), (0,))
    demand = only(CONFIG, Work.PREFILL, group=group)
    assert demand.scales[Dimension.KEY_HEADS] == Span(1, 1)
    assert demand.values[Dimension.GROUP_SIZE] == {16}
    assert Dimension.WINDOW not in demand.scales


def test_an_embedder_that_sees_all_asks_for_full_masks_without_a_cache() -> None:
    config = replace(CONFIG, num_pages=0, prefix_caching=False, cache_dtype=torch.bfloat16)
    demand = only(config, Work.PREFILL, AttentionUsage.EMBED_WHOLE)
    assert demand.values[Dimension.MASK] == {"full"}
    assert demand.values[Dimension.POLICY] == {CachePolicy.TRANSIENT.value}
    assert demand.scales[Dimension.CONTEXT] == Span(0, 0)
    assert AttentionUsage.EMBED_WHOLE.needs(config, Work.PREFILL) == {Feature.NON_CAUSAL}
    assert not {Dimension.POOL_SLOTS, Dimension.PAGE_ORDER, Dimension.SHARING} & {*demand.scales, *demand.values}


def test_trees_of_guesses_are_asked_of_the_backend_that_serves_rows_of_several_tokens() -> None:
    config = replace(CONFIG, speculation=Speculation(num_branches=2))
    for work in Work:
        masks = {
            mask
            for demand in demands_of(config, GROUP, work, AttentionUsage.GENERATE)
            for mask in demand.values[Dimension.MASK]
        }
        is_asked = work is Work.PREFILL
        assert masks == ({"causal", "tree"} if is_asked else {"causal"})
        assert AttentionUsage.GENERATE.needs(config, work) == ({Feature.TREE_MASK} if is_asked else set())
    assert AttentionUsage.GENERATE.needs(replace(CONFIG, speculation=Speculation()), Work.PREFILL) == set()


def test_an_embedder_of_long_texts_asks_for_pages_too_and_with_prefix_caching_for_nothing_else() -> None:
    def policies(config: ResolvedConfig, work: Work) -> list[str]:
        return [
            str(policy)
            for demand in demands_of(config, GROUP, work, AttentionUsage.EMBED)
            for policy in demand.values[Dimension.POLICY]
        ]

    plain = replace(CONFIG, prefix_caching=False)
    assert policies(plain, Work.PREFILL) == ["paged", "transient"]
    assert policies(plain, Work.DECODE) == ["paged"]
    assert policies(CONFIG, Work.PREFILL) == ["paged"]


@pytest.fixture(scope="module", params=["llama", "gpt_oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(str(request.param))
    make_model(str(request.param)).save_pretrained(path)
    return path


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Observed]:
    """What backends called `one` and `other` are asked for from here on."""
    seen: list[Observed] = []
    backends = {name: type(name.title(), (ObservingBackend,), {"seen": seen}) for name in ("one", "other")}
    install(monkeypatch, **backends)
    return seen


def beyond(seen: list[Observed], runtime: Runtime, usage: AttentionUsage) -> list[Observed]:
    """What no demand holds."""
    groups = {group.group.name: group.group for group in runtime.bindings}
    demands = {
        (name, work): demands_of(runtime.config, group, work, usage)
        for name, group in groups.items()
        for work in works_of(runtime.config)
    }
    return [
        each
        for each in seen
        if not any(holds(demand, each.point) for demand in demands.get((each.group, each.work), ()))
    ]


def ask(llm: LLM, prompts: list[list[int]], num_tokens: int, n: int = 1) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, n=n)
    llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params, use_tqdm=False)


BACKENDS = {
    "one": {"attention_backend": "one"},
    "two": {"attention_backend": "one", "decode_attention_backend": "other"},
}


@pytest.mark.parametrize("backends", routine(BACKENDS, "two"))
@pytest.mark.parametrize(
    ("chunk", "prefix_caching", "overlap"), [(12, True, True), (40, False, True), (40, True, False), (12, False, False)]
)
def test_every_step_of_an_engine_lies_within_what_it_demands(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    backends: dict[str, str],
    chunk: int,
    prefix_caching: bool,
    overlap: bool,
) -> None:
    seen = watched(monkeypatch)
    settings = {
        "skip_tokenizer_init": True,
        "cache_tokens": 120,
        "page_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 12,
        "max_num_batched_tokens": chunk,
        "prefix_caching": prefix_caching,
        "async_scheduling": overlap,
        **backends,
    }
    llm = LLM(str(folder), **cast("EngineSettings", settings))
    prompts = random_prompts([1, 60, 9, 30, 2, 14, 3, 25, 5, 8, 13, 4])
    ask(llm, prompts, 4)
    ask(llm, [[token] for token in range(3, 15)], 5)
    ask(llm, [[*prompts[3][:20], 7, 8, 9], [*prompts[3][:20], 3]], 30, n=3)
    ask(llm, [prompts[1]], 4)
    assert llm.engine.num_retractions > 0
    assert {each.work for each in seen} == set(Work)
    assert {each.point[Dimension.SHARING] for each in seen} == {"none", "prefix"}
    assert max(int(each.point[Dimension.CONTEXT]) + int(each.point[Dimension.NEW_TOKENS]) for each in seen) == 63
    assert len({each.point[Dimension.REUSE] for each in seen}) >= 3
    assert len({each.point[Dimension.COMPANY] for each in seen}) == 3
    assert beyond(seen, llm.engine.runtime, AttentionUsage.GENERATE) == []


NARROWED: dict[str, Callable[[ResolvedConfig], ResolvedConfig]] = {
    "rows": lambda config: replace(config, max_rows=config.max_rows - 1),
    "tokens": lambda config: replace(config, max_step_tokens=config.max_step_tokens - 1),
    "length": lambda config: replace(config, max_model_len=config.max_model_len - 10),
    "pool": lambda config: replace(config, num_pages=config.num_pages - 1),
    "pages": lambda config: replace(config, page_size=8),
    "sharing": lambda config: replace(config, max_model_len=config.page_size),
    "dtype": lambda config: replace(config, dtype=torch.float16),
    "cache": lambda config: replace(config, cache_dtype=torch.float16),
}


@pytest.mark.prove
@pytest.mark.parametrize("narrowed", NARROWED.values(), ids=NARROWED.keys())
def test_a_demand_that_is_too_narrow_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, folder: Path, narrowed: Callable[[ResolvedConfig], ResolvedConfig]
) -> None:
    seen = watched(monkeypatch)
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        cache_tokens=256,
        page_size=4,
        max_model_len=64,
        max_num_seqs=6,
        max_num_batched_tokens=20,
        attention_backend="one",
    )
    ask(llm, [[*([5] * 30), tail] for tail in range(6)], 33)
    runtime = llm.engine.runtime
    assert beyond(seen, runtime, AttentionUsage.GENERATE) == []
    assert beyond(seen, replace(runtime, config=narrowed(runtime.config)), AttentionUsage.GENERATE) != []


@pytest.mark.parametrize(
    ("settings", "policies"),
    [
        ({}, {"transient"}),
        ({"max_num_batched_tokens": 20}, {"transient", "paged"}),
        ({"prefix_caching": True, "max_num_batched_tokens": 20}, {"paged"}),
    ],
    ids=["whole", "chunks", "cached"],
)
def test_every_step_of_an_embedder_lies_within_what_it_demands(
    monkeypatch: pytest.MonkeyPatch, folder: Path, settings: dict[str, object], policies: set[str]
) -> None:
    seen = watched(monkeypatch)
    common = {"skip_tokenizer_init": True, "attention_backend": "one", "max_num_seqs": 5, "page_size": 4}
    llm = LLM(str(folder), **cast("EngineSettings", {"task": "embed", "max_model_len": 64, **common, **settings}))
    embedder = llm.embedder.embedder
    llm.embedder.embed_tokens(random_prompts([64, 3, 1, 40, 20, 21, 19, 2]))
    llm.embedder.embed_tokens([[*([5] * 40), tail] for tail in range(4)])
    assert {each.point[Dimension.POLICY] for each in seen} == policies
    assert beyond(seen, embedder.runtime, AttentionUsage.EMBED) == []
    assert beyond(seen, embedder.runtime, AttentionUsage.EMBED_WHOLE) != []


def test_every_step_of_an_embedder_that_sees_all_lies_within_what_it_demands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = watched(monkeypatch)
    save_embedder(make_bert(), tmp_path)
    llm = LLM(str(tmp_path), task="embed", attention_backend="one", max_num_seqs=5, skip_tokenizer_init=True)
    texts = random_prompts([64, 3, 1, 40, 20, 21, 19, 2])
    llm.embedder.embed_tokens([[token % VOCAB for token in text] for text in texts])
    runtime = llm.embedder.embedder.runtime
    assert beyond(seen, runtime, AttentionUsage.EMBED_WHOLE) == []
    assert beyond(seen, runtime, AttentionUsage.EMBED) != []
