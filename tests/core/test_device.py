"""Which device is used, and how much memory it has, is read from the machine and never guessed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sightline.core import device as device_module
from sightline.core.device import (
    Device,
    DeviceKind,
    DeviceMemory,
    available_bytes,
    detect_device,
    device_memory,
    has_cuda,
    lacks_products,
)
from sightline.core.errors import ConfigError

WriteFiles = Callable[[Path, str, str], None]
UNLIMITED = 1 << 62
CPU = Device(DeviceKind.CPU, torch.device("cpu"), "cpu", None)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_cgroup_v2(root: Path, limit: str, usage: str) -> None:
    write(root / "memory.max", f"{limit}\n")
    write(root / "memory.current", f"{usage}\n")


def write_cgroup_v1(root: Path, limit: str, usage: str) -> None:
    write(root / "memory" / "memory.limit_in_bytes", f"{limit}\n")
    write(root / "memory" / "memory.usage_in_bytes", f"{usage}\n")


@pytest.mark.parametrize("requested", ["auto", "cpu"])
def test_auto_and_cpu_are_the_cpu_without_a_gpu(requested: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect_device(requested) == CPU


def test_auto_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"is_available": True, "current_device": 1, "get_device_name": "H", "get_device_capability": (9, 0)}
    for name, fact in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, fact=fact: fact)
    assert detect_device("auto") == Device(DeviceKind.CUDA, torch.device("cuda", 1), "H", (9, 0))
    assert detect_device("cpu") == CPU


@pytest.mark.parametrize("requested", ["gpu", "CUDA", "", "cuda:7"])
def test_an_unknown_device_is_refused_with_the_known_ones(requested: str) -> None:
    with pytest.raises(ConfigError, match=f"expected --device auto, cpu or cuda, got '{requested}'"):
        detect_device(requested)


@pytest.mark.parametrize(
    ("requested", "what"),
    [
        ("npu", "an Ascend NPU"),
        ("npu:3", "an Ascend NPU"),
        ("hip", "an AMD GPU"),
        ("ROCm", "an AMD GPU"),
        ("musa", "a Moore Threads GPU"),
    ],
)
def test_a_device_that_no_backend_serves_is_refused_by_name(requested: str, what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        detect_device(requested)
    message = str(refused.value)
    assert message.startswith("expected --device auto, cpu or cuda")
    assert f"got '{requested}', {what}, for which there is no attention backend; use --device cpu" in message


@pytest.mark.parametrize("requested", ["auto", "cuda"])
def test_torch_for_rocm_is_not_taken_for_cuda(requested: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that CUDA is available, and an MI250 has Hopper's compute capability."""
    facts = {"is_available": True, "current_device": 0, "get_device_name": "MI250X", "get_device_capability": (9, 0)}
    for name, fact in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, fact=fact: fact)
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    with pytest.raises(ConfigError, match=rf"got '{requested}' with torch for ROCm 6\.4\.1, an AMD GPU.*--device cpu"):
        detect_device(requested)
    assert detect_device("cpu") == CPU
    assert not has_cuda()


def test_torch_for_rocm_without_a_card_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    assert detect_device("auto") == CPU


@pytest.mark.parametrize(("kind", "what"), [("npu", "an Ascend NPU"), ("musa", "a Moore Threads GPU")])
def test_auto_does_not_pass_over_an_accelerator_that_no_backend_serves(
    kind: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = SimpleNamespace(type=kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"got 'auto' with torch for {what}.*no attention backend; use --device cpu"):
        detect_device("auto")
    assert detect_device("cpu") == CPU


def test_cuda_without_cuda_is_an_error_and_never_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"expected a CUDA device for --device cuda.*use --device cpu"):
        detect_device("cuda")


@pytest.mark.parametrize(
    ("kind", "dtype", "has_library", "has_instructions", "lacks"),
    [
        (DeviceKind.CPU, torch.bfloat16, True, False, True),
        (DeviceKind.CPU, torch.bfloat16, True, True, False),
        (DeviceKind.CPU, torch.bfloat16, False, False, False),
        (DeviceKind.CPU, torch.float16, True, False, False),
        (DeviceKind.CUDA, torch.bfloat16, True, False, False),
    ],
)
def test_products_are_lacking_where_the_library_that_has_them_says_so(
    kind: DeviceKind,
    dtype: torch.dtype,
    has_library: bool,
    has_instructions: bool,
    lacks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_library)
    # A build without the library does not have its question either.
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    if has_library:
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_instructions, raising=False)
    assert lacks_products(replace(CPU, kind=kind), dtype) is lacks


def test_cuda_is_identified_by_its_own_index_name_and_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (12, index))
    assert detect_device("cuda") == Device(DeviceKind.CUDA, torch.device("cuda", 3), "card 3", (12, 3))


def test_memory_of_a_cuda_device_is_what_the_driver_calls_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 + device.index, 9000))
    assert available_bytes(Device(DeviceKind.CUDA, torch.device("cuda", 2), "card", (9, 0))) == 1002


def test_memory_of_a_card_is_read_after_torch_gave_back_what_it_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = [300]
    monkeypatch.setattr(torch.cuda, "empty_cache", cached.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 - sum(cached), 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 40 + sum(cached))
    card = Device(DeviceKind.CUDA, torch.device("cuda", 2), "card", (9, 0))
    assert device_memory(card) == DeviceMemory(total_bytes=9000, free_bytes=1000, held_bytes=40)


def test_a_cpu_has_the_memory_that_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "available_bytes", lambda device: 500)
    assert device_memory(CPU) == DeviceMemory(total_bytes=500, free_bytes=500, held_bytes=0)


@pytest.mark.parametrize(("host", "container"), [(500, 700), (700, 500)])
def test_the_smaller_of_host_and_container_counts(monkeypatch: pytest.MonkeyPatch, host: int, container: int) -> None:
    monkeypatch.setattr(device_module, "_host_available_bytes", lambda meminfo: host)
    monkeypatch.setattr(device_module, "_cgroup_headroom_bytes", lambda root: container)
    assert available_bytes(CPU) == 500


def test_this_machine_has_memory_left() -> None:
    assert 0 < available_bytes(CPU) <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_host_memory_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    write(meminfo, "MemTotal:       8000 kB\nMemFree:         100 kB\nMemAvailable:   4321 kB\nBuffers: 1 kB\n")
    assert device_module._host_available_bytes(meminfo) == 4321 * 1024


def test_host_memory_is_the_physical_one_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    old_kernel = tmp_path / "meminfo"
    write(old_kernel, "MemTotal: 8000 kB\nMemFree: 100 kB\n")
    assert device_module._host_available_bytes(old_kernel) == physical
    assert device_module._host_available_bytes(tmp_path / "none") == physical


@pytest.mark.parametrize("write_files", [write_cgroup_v1, write_cgroup_v2])
def test_a_containers_headroom_is_its_limit_less_its_use(tmp_path: Path, write_files: WriteFiles) -> None:
    write_files(tmp_path, "5000", "1200")
    assert device_module._cgroup_headroom_bytes(tmp_path) == 3800


@pytest.mark.parametrize("write_files", [write_cgroup_v1, write_cgroup_v2])
def test_a_container_over_its_limit_has_nothing_left(tmp_path: Path, write_files: WriteFiles) -> None:
    write_files(tmp_path, "1000", "1200")
    assert device_module._cgroup_headroom_bytes(tmp_path) == 0


def test_no_cgroup_is_no_limit(tmp_path: Path) -> None:
    assert device_module._cgroup_headroom_bytes(tmp_path) == UNLIMITED


def test_a_limit_of_max_is_no_limit(tmp_path: Path) -> None:
    write_cgroup_v2(tmp_path, "max", "1200")
    assert device_module._cgroup_headroom_bytes(tmp_path) == UNLIMITED


def test_version_ones_huge_number_is_no_limit_that_could_bind(tmp_path: Path) -> None:
    write_cgroup_v1(tmp_path, "9223372036854771712", "4096")
    assert device_module._cgroup_headroom_bytes(tmp_path) == UNLIMITED - 4096


def test_a_limit_of_version_one_counts_beside_an_unlimited_version_two(tmp_path: Path) -> None:
    write_cgroup_v2(tmp_path, "max", "1")
    write_cgroup_v1(tmp_path, "5000", "1200")
    assert device_module._cgroup_headroom_bytes(tmp_path) == 3800


def test_a_limit_without_a_use_beside_it_is_not_half_read(tmp_path: Path) -> None:
    write(tmp_path / "memory.max", "5000\n")
    assert device_module._cgroup_headroom_bytes(tmp_path) == UNLIMITED


def test_cached_file_pages_count_as_memory_that_is_there(tmp_path: Path) -> None:
    write_cgroup_v2(tmp_path, "5000", "4500")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 3000\nactive_file 500\n")
    assert device_module._cgroup_headroom_bytes(tmp_path) == 3500
