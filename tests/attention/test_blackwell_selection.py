"""Where the adapters for Blackwell serve, and how they are refused everywhere else."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from sightline.attention.backends.registry import BUILT_IN, find, offer
from sightline.attention.capability import Capability, Requirement, Work
from sightline.attention.selection import select_backend
from sightline.attention.spec import LatentSpec
from sightline.cli.application import app
from sightline.core.config import EngineConfig
from sightline.core.device import Device, DeviceKind, detect_device
from sightline.core.errors import ConfigError, NoBackendError
from support.blackwell_adapters import ADAPTERS, CANDIDATES, PLACES, SPECS
from support.tiny_models import load_runtime, make_model


def card(major: int, minor: int) -> Device:
    return Device(DeviceKind.CUDA, torch.device("cpu"), "a card", (major, minor))


def requirement(row: Capability, device: Device, page_size: int = 64) -> Requirement:
    [kind] = row.spec_kinds
    spec = SPECS[kind]
    if isinstance(spec, LatentSpec):
        spec = replace(spec, num_q_heads=128)
    return Requirement(spec, device, torch.bfloat16, torch.bfloat16, page_size)


OTHERS = {
    "a CPU": detect_device("cpu"),
    "Ampere": card(8, 0),
    "Hopper": card(9, 0),
    "Thor": card(11, 0),
    "SM120": card(12, 0),
    "SM121": card(12, 1),
    "SM107": card(10, 7),
}


@pytest.fixture
def with_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every package were installed, so that nothing but the device and the need is left to refuse."""
    monkeypatch.setattr("sightline.attention.capability._is_installed", lambda package: True)


@pytest.mark.usefixtures("with_packages")
@pytest.mark.parametrize("device", OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_that_is_named_on_another_device_is_refused(name: str, device: Device) -> None:
    row = CANDIDATES[name].rows()[0]
    with pytest.raises(NoBackendError) as refused:
        select_backend(offer(BUILT_IN, name), requirement(row, device), "group0")
    reason = "runs on cuda, not cpu" if device.kind is DeviceKind.CPU else "does not list compute capability"
    assert f"{name}: {reason}" in str(refused.value)


@pytest.mark.usefixtures("with_packages")
@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_serves_blackwell_if_it_is_named_and_only_then(name: str, capability: tuple[int, int]) -> None:
    row, device = CANDIDATES[name].rows()[0], card(*capability)
    for work in Work:
        named = select_backend(offer(BUILT_IN, name), requirement(row, device), "group0", work=work)
        assert named.candidate.name == name
        chosen = select_backend(offer(BUILT_IN, None), requirement(row, device), "group0", work=work)
        assert chosen.candidate.name not in ADAPTERS
        assert (name, ("serves only when asked for by name",)) in chosen.refused


@pytest.mark.usefixtures("with_packages")
@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("name", ADAPTERS)
def test_other_page_sizes_are_refused(name: str, page_size: int) -> None:
    row = CANDIDATES[name].rows()[0]
    with pytest.raises(NoBackendError, match=f"{name}: does not list page size {page_size}"):
        select_backend(offer(BUILT_IN, name), requirement(row, card(10, 0), page_size), "group0")


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_missing_library_is_the_reason_and_how_to_install_it_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sightline.attention.capability._is_installed", lambda package: False)
    row = find(name, BUILT_IN).rows()[0]
    with pytest.raises(NoBackendError) as refused:
        select_backend(offer(BUILT_IN, name), requirement(row, card(10, 0)), "group0")
    assert f"{name}: package {row.package} is not installed" in str(refused.value)
    assert "pip install 'sightline[" in str(refused.value)


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_broken_library_is_an_error_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = find(name, BUILT_IN)
    package = candidate.rows()[0].package
    assert package is not None
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, PLACES[name], raising=False)
    with pytest.raises(ConfigError, match=f"expected {package}, which backend '{name}' computes with"):
        candidate.load()


def test_every_row_lists_two_compute_capabilities_and_two_page_sizes() -> None:
    rows = [row for name in ADAPTERS for row in CANDIDATES[name].rows()]
    assert {row.compute_capabilities for row in rows} == {frozenset({(10, 0), (10, 3)})}
    assert {row.page_sizes for row in rows} == {frozenset({32, 64})}
    assert not any(CANDIDATES[name].by_default for name in ADAPTERS)


@pytest.mark.usefixtures("with_packages")
def test_an_engine_on_a_cpu_refuses_an_adapter_that_it_is_told_to_use(tmp_path: Path) -> None:
    make_model("deepseek_v3").save_pretrained(tmp_path)
    with pytest.raises(NoBackendError, match="trtllm-latent: runs on cuda, not cpu") as refused:
        load_runtime(tmp_path, EngineConfig(cache_tokens=256, page_size=32, attention_backend="trtllm-latent"))
    assert "Ask for" in str(refused.value), "and says which would serve"


@pytest.mark.parametrize("device", ["npu", "hip", "rocm", "musa"])
def test_a_command_refuses_a_device_that_nobody_here_has(device: str) -> None:
    result = CliRunner().invoke(app, ["capabilities", "--device", device])
    assert result.exit_code != 0
    assert isinstance(result.exception, ConfigError)
    assert f"got '{device}'" in str(result.exception)
    assert "no attention backend; use --device cpu" in str(result.exception)
