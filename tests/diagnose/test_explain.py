"""An engine is explained where it cannot be built, and exactly as it would be built."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sightline.attention.backends import registry
from sightline.attention.selection import Candidate
from sightline.core.config import EngineConfig
from sightline.core.errors import ConfigError, NoBackendError
from sightline.core.ledger import Ledger
from sightline.core.machines import KNOWN, find_device
from sightline.diagnose.explain import explain
from sightline.diagnose.explanation import NO_REMEDY, ExplainedChoice, Explanation
from sightline.models.loading.default_model import default_model_path
from sightline.models.loading.opening import open_checkpoint
from sightline.runner.build import build_runtime
from support.model_configs import ODD_HEADS, PUBLIC, write_config

DEVICES = (*KNOWN, "cpu")
SMALL: Mapping[str, Any] = {"max_model_len": 4096, "max_num_seqs": 8}
FEW_LAYERS = {**PUBLIC, "deepseek_v3": {**PUBLIC["deepseek_v3"], "num_hidden_layers": 5}, "odd": ODD_HEADS}
Ask = Callable[..., Explanation]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Explains a public model on a device, each combination once."""
    folder, known = tmp_path_factory.mktemp("configs"), dict[tuple[object, ...], Explanation]()

    def explained(model: str, device: str, **settings: Any) -> Explanation:
        key = (model, device, *sorted(settings.items()))
        if key not in known:
            path = write_config(folder / model, FEW_LAYERS[model])
            known[key] = explain(EngineConfig(str(path), **{**SMALL, **settings}), find_device(device))
        return known[key]

    return explained


def choices(explanation: Explanation) -> list[ExplainedChoice]:
    return [choice for group in explanation.groups for choice in group.choices]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", PUBLIC)
def test_every_other_backend_has_a_reason_and_a_remedy(ask: Ask, model: str, device: str) -> None:
    names = {candidate.name for candidate in registry.installed()}
    for choice in choices(ask(model, device)):
        told = {refused.name: refused for refused in choice.refused}
        assert told.keys() == names - {choice.name}
        assert all(refused.reasons and refused.remedy for refused in told.values())


CHOSEN: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "llama": {"h200": ("flashinfer", "triton"), "b200": ("triton", "triton"), "rtx5090": ("triton", "triton")},
    "gemma3": {"h100": ("flashinfer", "triton"), "a100": ("triton", "triton"), "l40s": ("triton", "triton")},
    "gpt_oss": {"h200": ("flash_attention", "triton"), "a100": ("triton", "triton"), "b200": ("triton", "triton")},
    "deepseek_v3": {"h200": ("flashinfer-latent", "triton-latent"), "rtx5090": ("triton-latent", "triton-latent")},
}


@pytest.mark.parametrize(("model", "device"), [(model, device) for model in CHOSEN for device in CHOSEN[model]])
def test_prefill_and_decode_of_one_row_are_served_by_what_ranks_highest(ask: Ask, model: str, device: str) -> None:
    served = {work: each.name for each in choices(ask(model, device)) for work in each.works}
    assert (served["prefill"], served["decode of one row"]) == CHOSEN[model][device]


def test_compute_capabilities_are_exact(ask: Ask) -> None:
    def reasons(device: str) -> Mapping[str, tuple[str, ...]]:
        [prefill, *_] = choices(ask("llama", device, page_size=32))
        return {refused.name: refused.reasons for refused in prefill.refused}

    hopper_only = reasons("rtx5090")["flashinfer"]
    assert "does not list compute capability (12, 0)" in hopper_only
    # TRT-LLM's kernels are listed for 10.0, and would serve there if they were named.
    assert "does not list compute capability (12, 0)" in reasons("rtx5090")["trtllm"]
    assert reasons("b200")["trtllm"] == ("serves only when asked for by name",)


def test_a_machine_that_is_not_here_has_every_package_and_no_proof(ask: Ask) -> None:
    explanation = ask("llama", "h200")
    assert not any(
        "is not installed" in reason for each in choices(explanation) for r in each.refused for reason in r.reasons
    )
    assert all(choice.unproven for choice in choices(explanation))
    [note] = [note for note in explanation.notes if "is not here" in note.fact]
    assert "with flashinfer, triton installed" in note.fact


def test_a_model_that_only_slow_kernels_serve_is_told_which_ones_do_not_and_why(ask: Ask) -> None:
    [prefill, *_] = choices(ask("odd", "h200"))
    told = {refused.name: refused for refused in prefill.refused}
    assert "does not list head dimension 104" in told["flashinfer"].reasons
    assert any("sinks" in reason for reason in told["flashinfer"].reasons)
    assert told["flashinfer"].remedy == NO_REMEDY


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_that_nothing_serves_ends_in_an_error_with_every_backend_and_its_reason(ask: Ask, device: str) -> None:
    settings: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": "float16"}
    if device == "cpu":
        # Numba and the reference read any cache.
        settings["attention_backend"] = "torch,triton,flashinfer"
    with pytest.raises(NoBackendError) as caught:
        ask("odd", device, **settings)
    message = str(caught.value)
    asked = settings.get("attention_backend", "").split(",") if device == "cpu" else None
    for candidate in registry.installed():
        assert candidate.name in message
        if asked is None or candidate.name in asked:
            assert f"  {candidate.name}: " in message
    assert "head dimension 104" in message
    assert "sinks" in message


def test_an_explanation_is_json(ask: Ask) -> None:
    data = json.loads(json.dumps(ask("gpt_oss", "h200").to_data()))
    assert data["groups"][0]["choices"][0]["refused"]
    assert data["settings"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(("model", "gibibytes"), [("llama", 14.96), ("gemma3", 1.862), ("gpt_oss", 12.82)])
def test_weights_are_counted_from_the_config_as_a_card_would_hold_them(ask: Ask, model: str, gibibytes: float) -> None:
    # 8.03 and 1.0 billion parameters in bf16; 20.9 billion of which experts are 4.25 bits each.
    weights = ask(model, "h200").memory.parts[0]
    assert weights.name == "weights"
    assert weights.num_bytes is not None
    assert weights.num_bytes / 2**30 == pytest.approx(gibibytes, rel=0.001)


def test_parts_of_the_memory_fit_what_the_engine_may_hold(ask: Ask) -> None:
    memory = ask("llama", "h100").memory
    parts = {part.name: part for part in memory.parts}
    assert sum(part.num_bytes or 0 for part in memory.parts) <= memory.allowed_bytes < memory.total_bytes
    assert dict(parts["workspace"].details)["activations"] > 0
    pools = parts["cache pools"]
    assert sum(size for _, size in pools.details) == pools.num_bytes
    [group] = ask("llama", "h100").groups
    capacity = ask("llama", "h100").capacity
    assert pools.num_bytes == capacity.num_pages * capacity.page_size * group.bytes_per_token


def test_a_model_that_does_not_fit_is_explained_all_the_same(tmp_path: Path) -> None:
    config = dict(PUBLIC["llama"]) | {"intermediate_size": 400_000}
    folder = write_config(tmp_path, config)
    explanation = explain(EngineConfig(str(folder)), find_device("rtx5090"))
    assert "expected weights that fit" in explanation.memory.shortage
    assert choices(explanation)[0].name == "triton"
    assert explanation.capacity.cache_tokens == 0
    assert [entry.subject for entry in explanation.degradations] == ["memory"]
    with pytest.raises(ConfigError, match="refused under --strict"):
        explain(EngineConfig(str(folder), strict=True), find_device("rtx5090"))


def test_the_default_model_is_explained_as_it_is_built() -> None:
    settings: dict[str, Any] = {"cache_tokens": 1024, "max_num_seqs": 4, "max_model_len": 512}
    explanation = explain(EngineConfig(**settings), find_device("cpu"))
    ledger = Ledger()
    runtime = build_runtime(EngineConfig(**settings), open_checkpoint(default_model_path(), ledger), ledger)
    chosen = [{work.value: each.candidate.name for work, each in selection.items()} for selection in runtime.selections]
    assert [
        {work: choice.name for choice in group.choices for work in choice.works} for group in explanation.groups
    ] == chosen
    parts = {part.name: part for part in explanation.memory.parts}
    assert parts["cache pools"].num_bytes == runtime.store.num_bytes
    own = dict[str, int]()
    for lease in runtime.workspace.ledger():
        own[lease.owner] = own.get(lease.owner, 0) + lease.num_bytes
    explained = dict(parts["workspace"].details)
    # Buckets of captured steps have plan buffers of their own, and threads scratch of their own.
    assert explained["activations"] == pytest.approx(own["activations"], rel=0.02)
    assert explained.keys() <= own.keys() | {"planner"}
    assert explanation.capacity.num_pages == runtime.config.num_pages
    assert list(explanation.captured) == [str(bucket.shape) for bucket in runtime.graphs.buckets]
    assert set(map(str, explanation.degradations)) <= set(map(str, ledger.degradations))


def test_a_backend_that_cannot_be_read_is_told_and_does_not_end_the_explanation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken() -> Any:
        raise ConfigError("its package is broken")

    extra = Candidate("broken", False, "somebody", broken, broken)
    installed = registry.installed()
    monkeypatch.setattr(registry, "installed", lambda: (*installed, extra))
    explanation = explain(EngineConfig(str(write_config(tmp_path, PUBLIC["llama"])), **SMALL), find_device("a100"))
    [told] = [refused for refused in choices(explanation)[0].refused if refused.name == "broken"]
    assert "its package is broken" in told.reasons


def test_layers_of_different_specs_are_explained_apart(ask: Ask) -> None:
    windows, full = ask("gemma3", "h200").groups
    assert (windows.features, full.features) == (("window",), ())
    assert (len(windows.layers), len(full.layers)) == (22, 4)
    assert (windows.spec["window"], full.spec["window"]) == (512, None)


def test_settings_change_what_is_explained(ask: Ask) -> None:
    [prefill, *_] = choices(ask("llama", "h200", prefill_attention_backend="triton"))
    assert prefill.name == "triton"
    told = {refused.name: refused for refused in prefill.refused}
    assert told["flashinfer"].reasons == ("triton was asked for",)


def test_shared_experts_take_scratch_for_the_rows_of_all_replicas(ask: Ask) -> None:
    def activations(**settings: Any) -> int:
        parts = ask("gpt_oss", "h200", data_parallel_size=4, **settings).memory.parts
        details = [each for part in parts if part.name == "workspace" for each in part.details]
        return sum(num_bytes for name, num_bytes in details if "activations" in name)

    # Buffers of experts for four replicas' rows; all others stay as they are.
    assert activations(enable_expert_parallel=True) > 2 * activations()
