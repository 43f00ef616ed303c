"""What was asked for and serves nothing is told, and so is a GPU on which no kernel made for GPUs serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sightline.attention import capability
from sightline.attention.backends import registry
from sightline.attention.backends.registry import BUILT_IN
from sightline.attention.capability import ANY, FEW_ROWS, Capability, Ranks, Work
from sightline.attention.groups import LayerGroup, group_layers
from sightline.attention.kinds import Feature
from sightline.attention.selection import Candidate
from sightline.attention.spec import SoftmaxSpec
from sightline.core import resolution
from sightline.core.config import EngineConfig
from sightline.core.device import Device, DeviceKind, DeviceMemory, detect_device
from sightline.core.errors import ConfigError
from sightline.core.ledger import Ledger
from sightline.core.resolution import ModelFacts, resolve
from sightline.models.loading.opening import open_checkpoint
from sightline.runner.backend_choice import tell_choices
from sightline.runner.build import build_runtime, select_backends
from support.tiny_models import make_model

FACTS = ModelFacts(max_positions=1000, weight_elements=500, quantised_bytes=0, cache_elements_per_token=10)
SPEC = SoftmaxSpec(4, 2, 64, 0.125)
GROUPS = group_layers([SPEC] * 2)
CPU = detect_device("cpu")
EMBEDS: dict[str, Any] = {"task": "embed", "max_model_len": 100}
"""Without a cache."""


def card(*compute_capability: int) -> Device:
    major, minor = compute_capability
    return Device(DeviceKind.CUDA, torch.device("cuda", 0), "card", (major, minor))


def told(device: Device = CPU, **settings: Any) -> list[str]:
    return told_of(BUILT_IN, GROUPS, device, **settings)


def told_of(
    candidates: Sequence[Candidate], groups: Sequence[LayerGroup], device: Device = CPU, **settings: Any
) -> list[str]:
    ledger = Ledger()
    config = resolve(EngineConfig(**settings), FACTS, device, ledger)
    tell_choices(config, groups, select_backends(config, groups, candidates), ledger)
    return [str(entry) for entry in ledger]


@pytest.fixture(autouse=True)
def _every_package_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "_is_installed", lambda package: True)
    monkeypatch.setattr(resolution, "device_memory", lambda device: DeviceMemory(1 << 40, 1 << 40, 0))


def test_what_serves_is_not_told() -> None:
    assert told() == []
    assert told(attention_backend="torch") == []
    assert told(attention_backend="torch", decode_attention_backend="reference") == []
    assert told(card(9, 0)) == []
    assert told(card(8, 0), attention_backend="torch") == []


def test_a_name_that_serves_nothing_is_told_with_the_reason() -> None:
    assert told(attention_backend="torch,triton") == [
        "attention_backend: triton serves nothing: runs on cuda, not cpu (leave it out)"
    ]
    assert told(prefill_attention_backend="reference, torch") == [
        "prefill_attention_backend: torch serves nothing: reference comes first (leave it out)"
    ]


def row_of(name: str, **changes: Any) -> Capability:
    """The first row of a backend, changed."""
    return replace(registry.find(name, BUILT_IN).rows()[0], **changes)


def fake(name: str, *rows: Capability) -> Candidate:
    return replace(registry.find("torch", BUILT_IN), name=name, rows=lambda: rows)


def test_each_groups_reason_is_told_where_they_differ() -> None:
    groups = group_layers([SPEC, replace(SPEC, window=8), replace(SPEC, head_dim=32)])
    causal = fake("causal", row_of("torch", features=frozenset(), page_sizes=frozenset({3})))
    windowed = fake("windowed", row_of("torch", features=frozenset({Feature.WINDOW}), page_sizes=frozenset({3})))
    candidates = [causal, windowed, *BUILT_IN]
    assert told_of(candidates, groups, attention_backend="causal,windowed,torch") == [
        "attention_backend: causal serves nothing: group0, group2: does not list page size 16; "
        "group1: does not list page size 16, lacks window (leave it out)",
        "attention_backend: windowed serves nothing: does not list page size 16 (leave it out)",
    ]


def test_what_serves_one_group_of_two_is_not_told() -> None:
    groups = group_layers([SPEC, replace(SPEC, window=8)])
    causal = fake("causal", row_of("torch", features=frozenset()))
    assert told_of([causal, *BUILT_IN], groups, attention_backend="causal,torch") == []


def test_each_kinds_reason_is_told_where_they_differ() -> None:
    candidates = [
        fake("slow", row_of("torch")),
        fake("first", row_of("torch", ranks=Ranks(prefill=1))),
        fake("second", row_of("torch", ranks=Ranks(few=1))),
    ]
    assert told_of(candidates, GROUPS, max_num_seqs=1, attention_backend="slow,first,second") == [
        "attention_backend: slow serves nothing: first is faster at prefill; second is faster at decode of one row "
        "(leave it out)"
    ]


def test_a_setting_that_two_others_leave_nothing_to_is_told() -> None:
    settings: dict[str, Any] = {"prefill_attention_backend": "reference", "decode_attention_backend": "reference"}
    assert told(attention_backend="torch", **settings) == [
        "attention_backend: torch serves nothing: prefill_attention_backend and decode_attention_backend decide "
        "instead (leave it out)"
    ]


@pytest.mark.parametrize("compute_capability", [(7, 5), (8, 7), (12, 1)])
def test_a_card_that_no_kernel_lists_is_told(compute_capability: tuple[int, int]) -> None:
    [entry] = told(card(*compute_capability))
    assert entry.startswith("attention backend: prefill, decode, decode of few rows, decode of one row of group0 is ")
    assert f"triton: does not list compute capability {compute_capability}" in entry
    assert "or ask for torch by name" in entry


def test_kernels_that_kinds_of_rows_go_without_are_told_of_each_kind() -> None:
    kernels = row_of("triton", page_sizes=frozenset({3}))
    portable = row_of("torch", dtypes=frozenset({torch.bfloat16}), cache_dtypes=ANY)
    candidates = [
        fake("prefills", replace(kernels, ranks=Ranks(prefill=2))),
        fake("decodes", replace(kernels, ranks=Ranks(few=2))),
        fake("portable", portable),
        fake("fewer", replace(portable, ranks=Ranks(few=1))),
    ]
    lacking = "does not list page size 16"
    assert told_of(candidates[:3], GROUPS, card(9, 0), max_num_seqs=1, page_size=16) == [
        "attention backend: prefill, decode of one row of group0 is served by portable, which is slower here "
        f"than what was refused; prefills: {lacking}; decodes: {lacking} (remove the reasons, or ask for portable by "
        "name)"
    ]
    first, second = told_of(candidates, GROUPS, card(9, 0), max_num_seqs=1, page_size=16)
    assert first.startswith("attention backend: prefill of group0 is served by portable, ")
    assert f"refused; prefills: {lacking} (remove" in first
    assert second.startswith("attention backend: decode of one row of group0 is served by fewer, ")
    assert f"refused; decodes: {lacking} (remove" in second


def test_a_kernel_for_the_card_that_serves_in_place_of_a_faster_one_is_not_told() -> None:
    faster = fake("faster", row_of("triton", ranks=Ranks(999, 999, 999), page_sizes=frozenset({3})))
    assert told_of([faster, *BUILT_IN], GROUPS, card(9, 0)) == []


def test_a_cache_that_no_kernel_reads_on_a_card_is_told() -> None:
    [entry] = told(card(8, 0), kv_cache_dtype="fp8")
    assert "is served by torch" in entry


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"max_num_seqs": 1}, [Work.PREFILL, Work.ALONE]),
        ({"max_num_seqs": 2}, [Work.PREFILL, Work.FEW, Work.ALONE]),
        ({"max_num_seqs": FEW_ROWS}, [Work.PREFILL, Work.FEW, Work.ALONE]),
        ({"max_num_seqs": FEW_ROWS + 1}, list(Work)),
        ({"max_num_batched_tokens": FEW_ROWS}, [Work.PREFILL, Work.FEW, Work.ALONE]),
        ({"task": "embed", "prefix_caching": True}, list(Work)),
        (EMBEDS, [Work.PREFILL]),
    ],
    ids=str,
)
def test_only_kinds_of_rows_that_run_have_a_backend(settings: dict[str, Any], wanted: list[Work]) -> None:
    config = resolve(EngineConfig(**settings), FACTS, CPU, Ledger())
    assert [list(selection) for selection in select_backends(config, GROUPS, BUILT_IN)] == [wanted]


@pytest.mark.parametrize("name", ["reference", "torch", "triton"])
def test_a_setting_for_decode_where_no_row_decodes_is_told_once_whoever_it_names(name: str) -> None:
    expected = f"decode_attention_backend: {name} serves nothing: without a cache no row decodes (leave it out)"
    assert told(**EMBEDS, decode_attention_backend=name) == [expected]
    assert told(**EMBEDS, decode_attention_backend=f"{name},{name}") == [expected]


def test_where_no_row_decodes_the_setting_for_prefill_leaves_nothing_to_others() -> None:
    assert told(**EMBEDS, attention_backend="triton", prefill_attention_backend="torch") == [
        "attention_backend: triton serves nothing: prefill_attention_backend decides instead (leave it out)"
    ]
    assert told(**EMBEDS, attention_backend="torch") == []


def test_a_card_that_no_kernel_lists_is_told_of_what_runs_on_it() -> None:
    [entry] = told(card(7, 5), **EMBEDS)
    assert entry.startswith("attention backend: prefill of group0 is served by torch, ")


@pytest.mark.parametrize("setting", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
@pytest.mark.parametrize("names", ["nonsense", "torch,,reference", ""])
def test_an_unknown_name_is_refused_with_the_setting_that_has_it(setting: str, names: str) -> None:
    settings: dict[str, Any] = {setting: names}
    with pytest.raises(ConfigError, match=f"expected {setting} out of triton, "):
        told(**settings)


@pytest.mark.parametrize("names", ["nonsense", "torch,,", ""])
def test_an_unknown_name_is_refused_also_where_it_would_serve_nothing(names: str) -> None:
    with pytest.raises(ConfigError, match="expected attention_backend out of triton, "):
        told(attention_backend=names, prefill_attention_backend="torch", decode_attention_backend="torch")


def test_an_engine_tells_its_choices(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    ledger = Ledger()
    config = EngineConfig(attention_backend="torch,triton", cache_tokens=64, max_model_len=64, enforce_eager=True)
    build_runtime(config, open_checkpoint(tmp_path, ledger), ledger)
    assert [entry.subject for entry in ledger] == ["attention_backend"]


def test_a_library_that_cannot_be_loaded_is_a_config_error_and_a_bug_of_ours_is_none() -> None:
    def broken() -> Any:
        raise OSError("libcudart.so.13: cannot open shared object file")

    own = registry._own("own", broken, registry.find("triton", BUILT_IN).rows(), "speed")
    with pytest.raises(
        ConfigError, match=r"expected triton, which backend 'own' computes with, to be importable, got "
    ):
        own.load()

    def wrong() -> Any:
        raise NameError("a name that is not there")

    with pytest.raises(NameError):
        registry._own("own", wrong, own.rows(), "speed").load()


def test_a_broken_library_is_found_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise ConfigError("the library is broken")

    make_model("llama").save_pretrained(tmp_path)
    torch_backend = replace(registry.find("torch", BUILT_IN), load=broken)
    monkeypatch.setattr(registry, "installed", lambda: (torch_backend,))
    ledger, read = Ledger(), list[int]()
    with pytest.raises(ConfigError, match="the library is broken"):
        build_runtime(EngineConfig(), open_checkpoint(tmp_path, ledger), ledger, lambda step: read.append(step.done))
    assert read == []
