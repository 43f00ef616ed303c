"""Whatever a user asks for is what runs, or the ledger says what does instead, or it is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.core.config import EngineConfig, KeptSettings, LayerKernels, Quantization
from sightline.core.device import Device, DeviceKind, DeviceMemory
from sightline.core.errors import ConfigError
from sightline.core.ledger import Ledger
from sightline.core.resolution import CACHE_DTYPES, DTYPES, ModelFacts, ResolvedConfig, resolve
from sightline.core.settings import stated

SMALL, LARGE = DeviceMemory(6 << 30, 6 << 30, 0), DeviceMemory(80 << 30, 80 << 30, 0)
CPU = Device(DeviceKind.CPU, torch.device("cpu"), "cpu", None, SMALL, is_here=False)
CARD = Device(DeviceKind.CUDA, torch.device("meta"), "card", (9, 0), LARGE, is_here=False)
FACTS = ModelFacts(4096, 1 << 28, 0, 1 << 15, vocab_size=32_000)
HYBRID = ModelFacts(4096, 1 << 28, 0, 1 << 15, vocab_size=32_000, state_bytes=1 << 20)
ENCODER = ModelFacts(4096, 1 << 26, 0, 1 << 12, takes_texts_whole=True)


def _is_kept(name: str) -> Callable[[ResolvedConfig, Any], bool]:
    return lambda run, asked: bool(vars(run)[name] == asked)


RUNS: Mapping[str, Callable[[ResolvedConfig, Any], bool]] = {
    "dtype": lambda run, asked: asked == "auto" or run.dtype is DTYPES[asked],
    "quantization": lambda run, asked: run.quantization is Quantization(asked),
    "max_model_len": lambda run, asked: asked is None or run.max_model_len == asked,
    "max_num_seqs": lambda run, asked: asked is None or run.max_rows == asked,
    "max_num_batched_tokens": lambda run, asked: asked is None or run.max_step_tokens == asked,
    "page_size": lambda run, asked: asked is None or (run.num_pages > 0 and run.page_size == asked),
    "cache_tokens": lambda run, asked: asked is None or run.cache_tokens == asked,
    "max_state_checkpoints": lambda run, asked: asked is None or run.max_checkpoints == asked,
    "kv_cache_dtype": lambda run, asked: asked == "auto" or run.cache_dtype is CACHE_DTYPES[asked],
    "prefix_caching": lambda run, asked: asked is None or run.prefix_caching == asked,
    "host_cache_gib": lambda run, asked: run.host_cache_bytes == int(asked * 2**30),
    "enable_hisparse": lambda run, asked: asked == (run.hot_buffer_size > 0),
    "cuda_graph_sizes": lambda run, asked: asked in (None, "auto") or list(run.graph_sizes) == _numbers(asked),
    "enforce_eager": lambda run, asked: not (asked and run.graph_sizes),
    "async_scheduling": lambda run, asked: asked is None or run.async_scheduling == asked,
    "speculative_config": lambda run, asked: (asked is None) == (run.speculation is None),
    "layer_kernels": lambda run, asked: asked == "auto" or run.layer_kernels is LayerKernels(asked),
    "max_queued_requests": lambda run, asked: run.max_queued == asked,
    **{each.name: _is_kept(each.name) for each in fields(KeptSettings)},
}
"""By setting: whether what runs is what was asked for."""
ELSEWHERE: Mapping[str, str] = {
    "model": "names the files",
    "task": "decides what the engine is for",
    "device": "is resolved before, or refused",
    "memory_fraction": "bounds the sizes that are compared here",
    "hisparse_config": "sizes enable_hisparse",
    "tensor_parallel_size": "is what part_of_rank carries out",
    "data_parallel_size": "is what Place carries out",
    "enable_expert_parallel": "is told by part_of_rank where it changes nothing",
    "dist_timeout": "is told by part_of_rank if there is one process",
    "chat_template": "is read with the tokenizer, or refused",
    "tool_call_parser": "is told by with_chosen_answers",
    "reasoning_parser": "is told by with_chosen_answers",
    "skip_tokenizer_init": "is carried out when the engine is built",
    "strict": "is the ledger's own",
}
"""Settings that resolution only passes on, and what becomes of them."""


def _numbers(text: str) -> list[int]:
    return sorted({int(part) for part in text.split(",")})


def untold(config: EngineConfig, run: ResolvedConfig, ledger: Ledger) -> list[str]:
    """Settings that do not run as they were asked for, and of which no entry speaks."""
    subjects = " ".join(entry.subject for entry in ledger)
    return [name for name, runs in RUNS.items() if not runs(run, vars(config)[name]) and name not in subjects]


def test_every_setting_is_compared_or_has_another_home() -> None:
    assert set(RUNS) | set(ELSEWHERE) == set(stated(EngineConfig))
    assert not set(RUNS) & set(ELSEWHERE)


VALUES: Mapping[str, st.SearchStrategy[Any]] = {
    "dtype": st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
    "quantization": st.sampled_from(["dequantise", "keep"]),
    "max_model_len": st.integers(1, 4096),
    "max_num_seqs": st.integers(1, 300),
    "max_num_batched_tokens": st.integers(1, 9000),
    "page_size": st.integers(1, 200),
    "cache_tokens": st.integers(1, 40_000),
    "max_state_checkpoints": st.integers(0, 600),
    "kv_cache_dtype": st.sampled_from(["auto", "float32", "bfloat16", "fp8"]),
    "memory_fraction": st.floats(0.2, 1.0),
    "prefix_caching": st.booleans(),
    "host_cache_gib": st.sampled_from([0.0, 0.001]),
    "cuda_graph_sizes": st.sampled_from(["auto", "1,2,4", "4,2,2", "1,512", "700"]),
    "enforce_eager": st.booleans(),
    "async_scheduling": st.booleans(),
    "layer_kernels": st.sampled_from(["auto", "torch", "triton", "numba"]),
    "speculative_config": st.just('{"method": "ngram", "num_speculative_tokens": 3}'),
    "tensor_parallel_size": st.integers(1, 4),
    "data_parallel_size": st.integers(1, 3),
    "max_queued_requests": st.integers(1, 9),
    "seed": st.integers(0, 9),
}
EMBEDS = {name: values for name, values in VALUES.items() if not stated(EngineConfig)[name].only_generates}
ASKED = st.one_of(
    st.fixed_dictionaries({}, optional=dict(VALUES)),
    st.fixed_dictionaries({"task": st.just("embed")}, optional=EMBEDS),
)


@settings(max_examples=400, deadline=None)
@given(asked=ASKED, facts=st.sampled_from([FACTS, HYBRID, ENCODER]), device=st.sampled_from([CPU, CARD]))
def test_what_is_asked_for_runs_or_is_told_or_refused(asked: dict[str, Any], facts: ModelFacts, device: Device) -> None:
    ledger = Ledger()
    try:
        config = EngineConfig(**asked)
        run = resolve(config, facts, device, ledger)
    except ConfigError:
        return
    assert untold(config, run, ledger) == []


@settings(max_examples=100, deadline=None)
@given(asked=ASKED, facts=st.sampled_from([FACTS, HYBRID, ENCODER]), device=st.sampled_from([CPU, CARD]))
def test_strict_refuses_what_would_be_degraded_and_nothing_else(
    asked: dict[str, Any], facts: ModelFacts, device: Device
) -> None:
    ledger = Ledger()
    try:
        config = EngineConfig(**asked)
        run = resolve(config, facts, device, ledger)
    except ConfigError:
        return
    strict = Ledger(strict=True)
    if ledger.degradations:
        with pytest.raises(ConfigError, match="refused under --strict"):
            resolve(config, facts, device, strict)
    else:
        assert resolve(config, facts, device, strict) == run
        assert strict.notes == ledger.notes


def test_a_difference_of_which_nobody_speaks_is_found() -> None:
    config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=8, max_model_len=100)
    ledger = Ledger()
    run = resolve(config, FACTS, CARD, ledger)
    assert untold(config, run, ledger) == []
    assert untold(config, run, Ledger()) == ["max_num_seqs"]
