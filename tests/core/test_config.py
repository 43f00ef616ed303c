"""What is asked for is checked, what is left open is decided once, and nothing is lowered in silence."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch

from sightline.core import resolution as resolution_module
from sightline.core.config import PADDING_PAGES, EngineConfig, LayerKernels, Quantization
from sightline.core.device import Device, DeviceKind, DeviceMemory
from sightline.core.errors import ConfigError
from sightline.core.ledger import Ledger
from sightline.core.memory import LEAST_RESERVE, RESERVE_SHARE, SCRATCH_SHARE, drawing_bytes
from sightline.core.resolution import ModelFacts, ResolvedConfig, resolve

CPU = Device(DeviceKind.CPU, torch.device("cpu"), "cpu", None)
CUDA = Device(DeviceKind.CUDA, torch.device("cuda", 0), "card", (9, 0))
FACTS = ModelFacts(max_positions=1000, weight_elements=500, quantised_bytes=0, cache_elements_per_token=10)
WEIGHT_BYTES = 500 * 4
PAGE_BYTES = 10 * 4 * 16


def resolved(config: EngineConfig, facts: ModelFacts = FACTS, device: Device = CPU) -> ResolvedConfig:
    """Resolved with no degradation allowed."""
    return resolve(config, facts, device, Ledger(strict=True))


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Plenty of memory, and instructions for every dtype, whatever the machine, until a test says otherwise."""
    set_memory(monkeypatch, DeviceMemory(1 << 40, 1 << 40, 0))
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    return monkeypatch


def give(memory: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Memory of `num_bytes` for fp32 weights and cache, with the share for scratch memory on top."""
    scratch = max(0, num_bytes - WEIGHT_BYTES - 1) // (SCRATCH_SHARE - 1)
    set_memory(memory, DeviceMemory(num_bytes + scratch, num_bytes + scratch, 0))


def set_memory(monkeypatch: pytest.MonkeyPatch, memory: DeviceMemory) -> None:
    monkeypatch.setattr(resolution_module, "device_memory", lambda device: memory)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": "int8"}, "expected dtype auto, float32, bfloat16 or float16, got 'int8'"),
    "cache dtype": (
        {"kv_cache_dtype": "int8"},
        "expected kv_cache_dtype auto, float32, bfloat16, float16, fp8, fp8_e4m3 or float8_e4m3fn, got 'int8'",
    ),
    "the other 8-bit float": (
        {"kv_cache_dtype": "fp8_e5m2"},
        "got 'fp8_e5m2': it keeps two binary digits of a number where e4m3 keeps three, and no backend reads it; use",
    ),
    "no rows": ({"max_num_seqs": 0}, "expected max_num_seqs to be a whole number of at least 1, got 0"),
    "no tokens": (
        {"max_num_batched_tokens": -1},
        "expected max_num_batched_tokens to be a whole number of at least 1, got -1",
    ),
    "no page": ({"page_size": 0}, "expected page_size to be a whole number of at least 1, got 0"),
    "no length": ({"max_model_len": 0}, "expected max_model_len to be a whole number of at least 1, got 0"),
    "no cache": ({"cache_tokens": 0}, "expected cache_tokens to be a whole number of at least 1, got 0"),
    "a boolean": ({"max_num_seqs": True}, "expected max_num_seqs to be a whole number of at least 1, got True"),
    "a fraction of a page": ({"page_size": 16.5}, "expected page_size to be a whole number of at least 1, got 16.5"),
    "a seed in words": ({"seed": "x"}, "expected seed to be a whole number, got 'x'"),
    "no fraction": ({"memory_fraction": 0.0}, r"expected memory_fraction in \(0, 1\], got 0.0"),
    "fraction above one": ({"memory_fraction": 1.01}, r"expected memory_fraction in \(0, 1\], got 1.01"),
    "fraction NaN": ({"memory_fraction": float("nan")}, "expected memory_fraction to be a finite number, got nan"),
}


@pytest.mark.parametrize(("settings", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_setting_that_cannot_work_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_the_smallest_and_largest_settings_are_taken() -> None:
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=1, page_size=1, cache_tokens=1, memory_fraction=1.0)
    assert config.memory_fraction == 1.0


def test_neither_config_can_be_changed() -> None:
    config = EngineConfig(cache_tokens=1000)
    for value in (config, resolved(config)):
        with pytest.raises(FrozenInstanceError):
            value.page_size = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("asked", "device", "expected"),
    [
        ("auto", CPU, torch.float32),
        ("auto", CUDA, torch.bfloat16),
        ("bfloat16", CPU, torch.bfloat16),
        ("float16", CUDA, torch.float16),
        ("float32", CUDA, torch.float32),
    ],
)
def test_dtype_is_as_asked_and_auto_follows_the_device(asked: str, device: Device, expected: torch.dtype) -> None:
    assert resolved(EngineConfig(dtype=asked, cache_tokens=1000), device=device).dtype is expected


@pytest.mark.parametrize(
    ("asked", "device", "expected"), [(None, CPU, 16), (None, CUDA, 64), (16, CUDA, 16), (3, CPU, 3)]
)
def test_pages_are_as_asked_and_otherwise_follow_the_device(asked: int | None, device: Device, expected: int) -> None:
    config = resolved(EngineConfig(page_size=asked, cache_tokens=1000), device=device)
    assert config.page_size == expected
    assert config.num_pages == -(-1000 // expected) + PADDING_PAGES


def test_a_length_above_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len of at most 1000.*got 1001; lower it"):
        resolved(EngineConfig(max_model_len=1001, cache_tokens=2000))
    assert resolved(EngineConfig(max_model_len=1000, cache_tokens=2000)).max_model_len == 1000


def test_the_length_is_the_models_where_none_is_asked_for() -> None:
    assert resolved(EngineConfig(cache_tokens=1000)).max_model_len == 1000


@pytest.mark.parametrize(("asked", "pages"), [(1000, 63), (1008, 63), (1009, 64), (5000, 313)])
def test_cache_tokens_are_as_asked_in_whole_pages(asked: int, pages: int) -> None:
    config = resolved(EngineConfig(cache_tokens=asked))
    assert config.num_pages == pages + PADDING_PAGES
    assert config.cache_tokens == pages * 16


def test_cache_tokens_that_the_memory_cannot_hold_are_refused(memory: pytest.MonkeyPatch) -> None:
    config = EngineConfig(max_model_len=100, cache_tokens=1000)
    enough = WEIGHT_BYTES + (63 + PADDING_PAGES) * PAGE_BYTES
    give(memory, enough)
    assert resolved(config).num_pages == 63 + PADDING_PAGES
    give(memory, enough - 1)
    with pytest.raises(ConfigError, match=r"the 40,959 bytes left beside the weights.*takes 40,960; lower cache_tok"):
        resolved(config)


def test_cache_tokens_beside_weights_that_do_not_fit_are_refused(memory: pytest.MonkeyPatch) -> None:
    give(memory, WEIGHT_BYTES - 1)
    with pytest.raises(ConfigError, match="fits the 0 bytes left beside the weights"):
        resolved(EngineConfig(cache_tokens=1000))


def test_other_settings_arrive_as_they_were_asked() -> None:
    config = resolved(
        EngineConfig(
            max_model_len=77,
            max_num_seqs=5,
            max_num_batched_tokens=99,
            page_size=8,
            cache_tokens=800,
            prefix_caching=False,
            max_queued_requests=70,
            async_scheduling=True,
            attention_backend="torch",
            prefill_attention_backend="reference",
            decode_attention_backend="other",
            seed=3,
            paranoid=True,
            require_proof=True,
            quantization="keep",
            layer_kernels="torch",
        )
    )
    assert config == ResolvedConfig(
        device=CPU,
        dtype=torch.float32,
        cache_dtype=torch.float32,
        quantization=Quantization.KEEP,
        max_model_len=77,
        max_rows=5,
        max_step_tokens=99,
        page_size=8,
        num_pages=101,
        scratch_bytes=config.scratch_bytes,
        memory=config.memory,
        prefix_caching=False,
        max_queued=70,
        async_scheduling=True,
        attention_backend="torch",
        prefill_attention_backend="reference",
        decode_attention_backend="other",
        seed=3,
        paranoid=True,
        require_proof=True,
    )


def test_proof_is_asked_for_only_where_the_user_asks() -> None:
    assert not resolved(EngineConfig(cache_tokens=1000)).require_proof


def test_weights_that_stay_quantised_leave_room_for_more_pages(memory: pytest.MonkeyPatch) -> None:
    give(memory, 200_000 + 20 * PAGE_BYTES)
    exact = replace(FACTS, weight_elements=50_000)
    kept, uncounted = (replace(FACTS, weight_elements=0, quantised_bytes=count) for count in (100_000, 0))
    config = EngineConfig(max_model_len=100)
    pages = [resolved(config, facts).num_pages for facts in (exact, kept, uncounted)]
    assert pages[0] < pages[1] < pages[2], "kept weights take less, but not nothing"


def test_an_unknown_way_with_quantised_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected quantization dequantise or keep, got 'awq'"):
        EngineConfig(quantization="awq")


@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_the_cache_takes_its_share_of_what_the_weights_leave(memory: pytest.MonkeyPatch, fraction: float) -> None:
    config = EngineConfig(max_model_len=160, memory_fraction=fraction)
    enough = WEIGHT_BYTES + int((10 + PADDING_PAGES) * PAGE_BYTES / fraction)
    give(memory, enough)
    assert resolved(config).num_pages == 10 + PADDING_PAGES
    give(memory, enough + int(PAGE_BYTES / fraction))
    assert resolved(config).num_pages == 11 + PADDING_PAGES
    give(memory, enough + int(PAGE_BYTES / fraction) - 1)
    assert resolved(config).num_pages == 10 + PADDING_PAGES


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("auto", torch.bfloat16),
        ("float32", torch.float32),
        ("float16", torch.float16),
        ("fp8", torch.float8_e4m3fn),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("float8_e4m3fn", torch.float8_e4m3fn),
    ],
)
def test_the_cache_is_in_the_dtype_that_is_asked_for_and_auto_is_the_compute_dtype(
    asked: str, expected: torch.dtype
) -> None:
    config = resolved(EngineConfig(dtype="bfloat16", kv_cache_dtype=asked, cache_tokens=1000))
    assert (config.dtype, config.cache_dtype) == (torch.bfloat16, expected)


def test_a_narrower_cache_has_room_for_more_pages(memory: pytest.MonkeyPatch) -> None:
    give(memory, WEIGHT_BYTES + 20 * PAGE_BYTES)
    wide, narrow = (
        resolved(EngineConfig(dtype="float32", kv_cache_dtype=dtype, max_model_len=100)) for dtype in ("auto", "fp8")
    )
    assert narrow.num_pages - 1 > 3 * (wide.num_pages - 1)


def test_a_cache_dtype_where_nothing_is_cached_is_told() -> None:
    ledger = Ledger()
    config = resolve(EngineConfig(task="embed", kv_cache_dtype="fp8"), FACTS, CPU, ledger)
    assert [entry.subject for entry in ledger] == ["kv_cache_dtype"]
    assert config.cache_dtype is config.dtype


def test_a_share_of_memory_for_a_cache_that_is_not_there_is_said_to_change_nothing() -> None:
    ledger = Ledger()
    resolve(EngineConfig(task="embed", memory_fraction=0.9), FACTS, CPU, ledger)
    assert [(entry.subject, entry.outcome) for entry in ledger.degradations] == [
        ("memory_fraction", "0.9 changes nothing: texts are embedded without a cache")
    ]
    resolve(EngineConfig(task="embed"), FACTS, CPU, Ledger(strict=True))
    resolve(EngineConfig(task="embed", memory_fraction=0.8), FACTS, CUDA, Ledger(strict=True))


GIB = 1 << 30
CARD = DeviceMemory(total_bytes=100 * GIB, free_bytes=98 * GIB, held_bytes=0)
ON_CARD = ModelFacts(
    max_positions=1 << 20, weight_elements=8 * GIB, quantised_bytes=0, cache_elements_per_token=1 << 16
)
"""16 GiB of weights and 128 KiB of cache a token in bf16: more than the card can hold."""
RESERVE = 2 * GIB


def cache_bytes(config: ResolvedConfig) -> int:
    return config.num_pages * config.page_size * (1 << 17)


@pytest.mark.parametrize(
    ("asked", "card", "expected"),
    [
        (None, CARD, 90 * GIB),
        (0.5, CARD, 50 * GIB),
        (1.0, CARD, 98 * GIB),
        (0.9, replace(CARD, free_bytes=60 * GIB), 60 * GIB),
        (0.9, replace(CARD, free_bytes=60 * GIB, held_bytes=38 * GIB), 52 * GIB),
        (0.9, replace(CARD, free_bytes=90 * GIB, held_bytes=8 * GIB), 82 * GIB),
    ],
    ids=["default", "half", "all", "others hold 40", "this process holds 38", "it holds 8"],
)
def test_a_process_takes_its_share_of_the_whole_card(
    memory: pytest.MonkeyPatch, asked: float | None, card: DeviceMemory, expected: int
) -> None:
    set_memory(memory, card)
    config = resolve(EngineConfig(memory_fraction=asked), ON_CARD, CUDA, Ledger())
    assert max(LEAST_RESERVE, CARD.total_bytes // RESERVE_SHARE) == RESERVE
    taken = 16 * GIB + RESERVE + config.scratch_bytes + cache_bytes(config)
    page = 64 << 17
    assert expected - page < taken <= expected


def test_weights_that_do_not_fit_the_share_of_a_card_are_refused_with_the_numbers(memory: pytest.MonkeyPatch) -> None:
    set_memory(memory, CARD)
    resolve(EngineConfig(memory_fraction=0.19), ON_CARD, CUDA, Ledger())
    for task in ("generate", "embed"):
        with pytest.raises(
            ConfigError,
            match=r"fit 0\.17 of the card, got [\d,]+ bytes too many \(98\.00 GiB free of 100\.00 GiB, .* may "
            r"hold 17\.00 GiB and holds 0\.00 GiB; weights 16\.00 GiB, .* reserve 2\.00 GiB\); raise memory_fraction",
        ):
            resolve(EngineConfig(task=task, memory_fraction=0.17), ON_CARD, CUDA, Ledger())


def test_a_cache_that_does_not_fit_the_share_of_a_card_is_refused_with_the_numbers(memory: pytest.MonkeyPatch) -> None:
    set_memory(memory, CARD)
    tokens = resolve(EngineConfig(), ON_CARD, CUDA, Ledger()).cache_tokens
    resolve(EngineConfig(cache_tokens=tokens), ON_CARD, CUDA, Ledger())
    with pytest.raises(ConfigError, match=r"lower cache_tokens \(98\.00 GiB free of 100\.00 GiB, .* hold 90\.00 GiB"):
        resolve(EngineConfig(cache_tokens=tokens + 64), ON_CARD, CUDA, Ledger())


@pytest.mark.parametrize(("dtype", "told"), [("bfloat16", ["dtype"]), ("float32", []), ("auto", [])])
def test_a_dtype_that_the_cpu_has_no_instructions_for_is_told(
    monkeypatch: pytest.MonkeyPatch, dtype: str, told: list[str]
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    ledger = Ledger()
    resolve(EngineConfig(dtype=dtype), FACTS, CPU, ledger)
    assert [entry.subject for entry in ledger] == told
    resolved(EngineConfig(dtype="bfloat16"), device=CUDA)


def test_a_smaller_dtype_makes_room_for_more_pages(memory: pytest.MonkeyPatch) -> None:
    give(memory, WEIGHT_BYTES + 20 * PAGE_BYTES)
    full, half = (resolved(EngineConfig(dtype=dtype, max_model_len=100)) for dtype in ("float32", "float16"))
    assert full.num_pages == 10
    assert half.num_pages > 2 * full.num_pages - PADDING_PAGES


def test_a_lowered_length_stands_in_the_ledger(memory: pytest.MonkeyPatch) -> None:
    give(memory, WEIGHT_BYTES + 2 * 11 * PAGE_BYTES)
    ledger = Ledger()
    config = resolve(EngineConfig(), FACTS, CPU, ledger)
    assert config.max_model_len == config.cache_tokens == 160
    (entry,) = ledger.degradations
    assert entry.subject == "max_model_len"
    assert "from the model's 1000 to 160" in entry.outcome


def test_a_lowered_length_is_an_error_under_strict(memory: pytest.MonkeyPatch) -> None:
    give(memory, WEIGHT_BYTES + 2 * 11 * PAGE_BYTES)
    with pytest.raises(ConfigError, match="refused under --strict: max_model_len"):
        resolve(EngineConfig(), FACTS, CPU, Ledger(strict=True))


def test_a_cache_that_just_holds_the_length_is_no_degradation() -> None:
    ledger = Ledger()
    config = resolve(EngineConfig(cache_tokens=1000), replace(FACTS, max_positions=1008), CPU, ledger)
    assert config.max_model_len == 1008
    assert ledger.degradations == ()


@pytest.mark.parametrize("cache_tokens", [None, 160])
def test_an_asked_length_that_does_not_fit_is_refused(memory: pytest.MonkeyPatch, cache_tokens: int | None) -> None:
    give(memory, WEIGHT_BYTES + 2 * 11 * PAGE_BYTES)
    ledger = Ledger()
    with pytest.raises(ConfigError, match=r"at least max_model_len = 161 tokens, got room for 160.*raise cache_tokens"):
        resolve(EngineConfig(max_model_len=161, cache_tokens=cache_tokens), FACTS, CPU, ledger)
    assert list(ledger) == []


def test_there_are_never_more_pages_than_every_row_can_fill(memory: pytest.MonkeyPatch) -> None:
    give(memory, 1 << 40)
    config = resolved(EngineConfig(max_num_seqs=3, max_model_len=100))
    assert config.num_pages == 3 * 7 + PADDING_PAGES


@pytest.mark.parametrize("asked", [(64, 8), (8, 64)])
def test_rows_never_outnumber_the_tokens_of_a_step(asked: tuple[int, int]) -> None:
    config = EngineConfig(max_num_seqs=asked[0], max_num_batched_tokens=asked[1], cache_tokens=1000)
    assert resolve(config, FACTS, CPU, Ledger()).max_rows == 8


def test_rows_that_a_step_can_never_hold_get_no_pages(memory: pytest.MonkeyPatch) -> None:
    give(memory, 1 << 40)
    config = resolve(EngineConfig(max_num_seqs=64, max_num_batched_tokens=8, max_model_len=100), FACTS, CPU, Ledger())
    assert config.num_pages == config.max_rows * 7 + PADDING_PAGES


def test_fewer_rows_than_asked_for_stand_in_the_ledger() -> None:
    ledger = Ledger()
    config = resolve(EngineConfig(max_num_seqs=64, max_num_batched_tokens=8, cache_tokens=1000), FACTS, CPU, ledger)
    assert config.max_rows == 8
    assert [entry.subject for entry in ledger.degradations] == ["max_num_seqs"]


@pytest.mark.parametrize("spare", [-WEIGHT_BYTES, -1, 0, 4 * PAGE_BYTES - 1])
def test_no_memory_for_a_page_is_refused(memory: pytest.MonkeyPatch, spare: int) -> None:
    give(memory, WEIGHT_BYTES + spare)
    with pytest.raises(ConfigError, match=r"at least one cache page of 640 bytes.*got -?[\d,]+ bytes left; use"):
        resolve(EngineConfig(), FACTS, CPU, Ledger())


def test_memory_for_one_page_beside_the_padding_page_is_enough(memory: pytest.MonkeyPatch) -> None:
    give(memory, WEIGHT_BYTES + 4 * PAGE_BYTES)
    assert resolve(EngineConfig(), FACTS, CPU, Ledger()).cache_tokens == 16


@pytest.mark.parametrize("asked", [{"cache_tokens": 512}, {"page_size": 16}], ids=str)
def test_a_cache_that_is_not_set_aside_is_told(asked: dict[str, int]) -> None:
    config, ledger = EngineConfig(task="embed", max_model_len=64, **asked), Ledger()  # type: ignore[arg-type]
    assert resolve(config, FACTS, CPU, ledger).num_pages == 0
    assert [entry.subject for entry in ledger] == [*asked]
    with pytest.raises(ConfigError, match=next(iter(asked))):
        resolved(config)


def graph_sizes(asked: str | None, ledger: Ledger | None = None, **settings: Any) -> tuple[int, ...]:
    config = EngineConfig(cuda_graph_sizes=asked, **settings)
    return resolve(config, FACTS, CUDA, ledger or Ledger(strict=True)).graph_sizes


@pytest.mark.parametrize(
    ("asked", "rows", "expected"),
    [
        (None, 20, (1, 2, 4, 8, 16, 20)),
        ("8,2, 2,1", 64, (1, 2, 8)),
        ("auto", 1, (1,)),
        ("auto", 20, (1, 2, 4, 8, 16, 20)),
        ("auto", 64, (1, 2, 4, 8, 16, 24, 32, 48, 64)),
        ("auto", 200, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 200)),
    ],
)
def test_steps_are_captured_for_the_sizes_that_are_asked_for(
    asked: str | None, rows: int, expected: tuple[int, ...]
) -> None:
    assert graph_sizes(asked, max_num_seqs=rows) == expected


@pytest.mark.parametrize("asked", ["", "0", "1,,2", "-1", "1;2", "1.5", "all", "9" * 5000])
def test_sizes_that_are_no_numbers_are_refused(asked: str) -> None:
    with pytest.raises(ConfigError, match="expected cuda_graph_sizes auto, or numbers from 1 such as 1,2,4,8, got"):
        graph_sizes(asked)


def test_sizes_that_no_step_can_have_are_told() -> None:
    ledger = Ledger()
    assert graph_sizes("4,8,16,32", ledger, max_num_seqs=8) == (4, 8)
    assert graph_sizes("64", ledger, max_num_seqs=8) == ()
    assert [each.outcome for each in ledger.degradations] == [
        "16, 32 left out: a step has at most 8 rows",
        "64 left out: a step has at most 8 rows",
    ]


def test_a_cache_of_few_pages_bounds_the_sizes() -> None:
    assert graph_sizes("auto", max_num_seqs=64, cache_tokens=640, max_model_len=64, page_size=64) == (1, 2, 4, 8, 10)


def test_recorded_steps_on_a_cpu_need_compiled_kernels_and_eager_is_always_fine() -> None:
    ledger = Ledger()
    config = EngineConfig(cuda_graph_sizes="auto", layer_kernels="torch")
    assert resolve(config, FACTS, CPU, ledger).graph_sizes == ()
    assert [each.subject for each in ledger.degradations] == ["cuda_graph_sizes"]
    for device in (CPU, CUDA):
        assert resolved(EngineConfig(enforce_eager=True), device=device).graph_sizes == ()
    with pytest.raises(ConfigError, match="expected cuda_graph_sizes or enforce_eager, got both; leave one out"):
        EngineConfig(enforce_eager=True, cuda_graph_sizes="auto")


def test_a_gpu_gets_graphs_fused_kernels_overlap_and_large_steps_without_being_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resolution_module, "find_spec", lambda name: object())
    config = resolved(EngineConfig(), device=CUDA)
    assert config.graph_sizes == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
    assert config.layer_kernels is LayerKernels.TRITON
    assert config.async_scheduling
    assert (config.max_rows, config.max_step_tokens) == (256, 8192)


def test_guessed_tokens_cost_a_gpu_its_overlap_and_the_ledger_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution_module, "find_spec", lambda name: object())
    guessing = EngineConfig(speculative_config={"method": "ngram"})
    for device, subjects in ((CUDA, ["async_scheduling"]), (CPU, [])):
        ledger = Ledger()
        config = resolve(guessing, FACTS, device, ledger)
        assert config.speculation is not None
        assert not config.async_scheduling
        assert [each.subject for each in ledger.degradations] == subjects


def test_a_cpu_gets_compiled_kernels_and_recorded_steps_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution_module, "find_spec", lambda name: object())
    config = resolved(EngineConfig())
    assert (config.graph_sizes, config.layer_kernels) == ((1, 2, 4, 8), LayerKernels.NUMBA)
    assert not config.async_scheduling
    assert (config.max_rows, config.max_step_tokens) == (64, 512)
    assert resolved(EngineConfig(max_num_seqs=3)).graph_sizes == (1, 2, 3)
    assert resolved(EngineConfig(cuda_graph_sizes="16,3")).graph_sizes == (3, 16)


def test_a_cpu_that_embeds_records_nothing_and_one_that_is_asked_to_runs_torchs_kernels() -> None:
    for config, kernels in (
        (EngineConfig(task="embed"), LayerKernels.NUMBA),
        (EngineConfig(layer_kernels="torch"), LayerKernels.TORCH),
    ):
        chosen = resolved(config)
        assert (chosen.graph_sizes, chosen.layer_kernels) == ((), kernels)


def test_without_numba_a_cpu_runs_torchs_kernels_and_tells_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution_module, "find_spec", lambda name: None)
    ledger = Ledger()
    config = resolve(EngineConfig(), FACTS, CPU, ledger)
    assert (config.graph_sizes, config.layer_kernels) == ((), LayerKernels.TORCH)
    assert ["no decode step is recorded: numba is not installed" in each.outcome for each in ledger.degradations] == [
        True
    ]
    with pytest.raises(ConfigError, match="expected numba to be installed for layer_kernels numba"):
        resolved(EngineConfig(layer_kernels="numba"))


def test_compiled_kernels_are_refused_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"expected layer_kernels torch or triton on the device .*, got numba"):
        resolved(EngineConfig(layer_kernels="numba"), device=CUDA)


def test_an_embedding_engine_on_a_gpu_captures_nothing_and_leaves_nothing_in_flight() -> None:
    config = resolved(EngineConfig(task="embed"), device=CUDA)
    assert (config.graph_sizes, config.async_scheduling) == ((), False)
    assert (config.max_rows, config.max_step_tokens) == (1024, 4096)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=["cpu", "cuda"])
@pytest.mark.parametrize("asked", [True, False])
def test_overlap_is_as_asked_on_any_device(device: Device, asked: bool) -> None:
    assert resolved(EngineConfig(async_scheduling=asked), device=device).async_scheduling is asked


def test_without_triton_a_gpu_runs_torch_kernels_and_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution_module, "find_spec", lambda name: None)
    ledger = Ledger()
    assert resolve(EngineConfig(), FACTS, CUDA, ledger).layer_kernels is LayerKernels.TORCH
    assert [each.subject for each in ledger.degradations] == ["layer_kernels"]
    assert resolved(EngineConfig(layer_kernels="torch"), device=CUDA).layer_kernels is LayerKernels.TORCH


@pytest.mark.parametrize(
    ("settings", "rows"),
    [({"enforce_eager": True}, 4 * 8), ({}, 4 * 8 + 2 * (1 + 2 + 4 + 8)), ({"cuda_graph_sizes": "4"}, 4 * 8 + 2 * 4)],
    ids=str,
)
def test_the_logits_of_steps_and_graphs_are_reserved_before_the_cache_is_sized(
    settings: dict[str, Any], rows: int
) -> None:
    config = EngineConfig(max_num_seqs=8, layer_kernels="torch", **settings)
    reserved = [resolved(config, replace(FACTS, vocab_size=size), CUDA).memory.reserve_bytes for size in (0, 1000)]
    assert reserved[1] - reserved[0] == rows * 1000 * 4 + drawing_bytes(8, 1000)


def test_an_embedder_reserves_nothing_for_logits() -> None:
    config = EngineConfig(task="embed", layer_kernels="torch")
    reserved = [resolved(config, replace(FACTS, vocab_size=size), CUDA).memory.reserve_bytes for size in (0, 1000)]
    assert reserved[0] == reserved[1]
