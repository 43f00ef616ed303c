"""Detects the device and its available memory.

Owns detection. Does not know what the memory is for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

import torch

from sightline.core.errors import ConfigError, DeviceFaultError


class DeviceKind(Enum):
    """Kinds of device that a capability row can name."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class Device:
    """One device, identified once at start-up."""

    kind: DeviceKind
    torch_device: torch.device
    name: str
    compute_capability: tuple[int, int] | None
    """CUDA's (major, minor); None on a CPU."""
    memory: DeviceMemory | None = None
    """What engines are planned with, in place of what the device reports."""
    is_here: bool = True
    """False for a device that engines can be planned for and not built on."""


WITHOUT_BACKENDS = {
    "npu": "an Ascend NPU",
    "hip": "an AMD GPU",
    "rocm": "an AMD GPU",
    "musa": "a Moore Threads GPU",
}
"""Devices that torch can have and that no attention backend serves (ADR 53), under the names that users ask for."""


def has_cuda() -> bool:
    """True if torch has an NVIDIA GPU. A build for ROCm also says that CUDA is available."""
    return torch.cuda.is_available() and torch.version.hip is None


def detect_device(requested: str) -> Device:
    """Resolves `--device`: auto is an NVIDIA GPU, if there is one, otherwise the CPU.

    Raises `ConfigError` if the device is missing, or if it is one that no backend serves: auto never passes over it.
    """
    name = requested.partition(":")[0].lower()
    if name in WITHOUT_BACKENDS:
        raise _no_backends(f"got {requested!r}, {WITHOUT_BACKENDS[name]}")
    if requested in ("auto", "cuda"):
        _refuse_others(requested)
    if requested == "auto":
        requested = "cuda" if has_cuda() else "cpu"
    if requested == "cpu":
        return Device(DeviceKind.CPU, torch.device("cpu"), "cpu", None)
    if requested == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                "expected a CUDA device for --device cuda, got none that torch can use; "
                "use --device cpu, or install a CUDA build of torch"
            )
        index = torch.cuda.current_device()
        return Device(
            DeviceKind.CUDA,
            torch.device("cuda", index),
            torch.cuda.get_device_name(index),
            torch.cuda.get_device_capability(index),
        )
    raise ConfigError(f"expected --device auto, cpu or cuda, got {requested!r}")


def _refuse_others(requested: str) -> None:
    """Raises if the accelerator that torch would use is one that no backend serves."""
    if torch.cuda.is_available() and torch.version.hip is not None:
        # Some of its compute capabilities are those of NVIDIA GPUs: a gfx90a says (9, 0), as Hopper does.
        raise _no_backends(f"got {requested!r} with torch for ROCm {torch.version.hip}, {WITHOUT_BACKENDS['hip']}")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in WITHOUT_BACKENDS:
        raise _no_backends(f"got {requested!r} with torch for {WITHOUT_BACKENDS[accelerator.type]}")


def _no_backends(got: str) -> ConfigError:
    return ConfigError(
        f"expected --device auto, cpu or cuda, with an NVIDIA GPU or none, {got}, for which there is no attention "
        "backend; use --device cpu (docs/adr/0053-nothing-is-claimed-for-devices-that-nobody-here-has.md says what a "
        "backend would need)"
    )


def lacks_products(device: Device, dtype: torch.dtype) -> bool:
    """True for a CPU without matrix instructions for the dtype, where torch falls back to scalar code: several hundred
    times slower than float32 on a Neoverse-N1."""
    return (
        device.kind is DeviceKind.CPU
        and dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


@contextmanager
def single_threaded() -> Iterator[None]:
    """Runs torch's CPU operations on one thread.

    For many small operations, such as decoding weights: torch's threads spin while they wait for each other, which on a
    busy machine costs ten times what a second thread gains.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def same_stream(device: Device) -> Callable[[], AbstractContextManager[object]]:
    """Returns a factory of contexts that make the CUDA device and stream current now current in any thread.

    The current device and stream are per thread, and streams are not ordered with each other: a thread that continues
    another's work could read data that is not written yet.
    """
    if device.kind is DeviceKind.CUDA:
        return partial(torch.cuda.stream, torch.cuda.current_stream(device.torch_device))
    return nullcontext


@contextmanager
def device_faults() -> Iterator[None]:
    """Turns unrecoverable device errors into `DeviceFaultError`: after one, every later call fails too."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceFaultError(f"the device failed, and what was on it is lost: {error}") from error


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device at one moment, in bytes."""

    total_bytes: int
    """A whole card. On a CPU, what is available: the rest belongs to others."""
    free_bytes: int
    """What can be allocated."""
    held_bytes: int
    """What torch holds on a card for this process, in use or cached; 0 on a CPU."""

    def of_one(self, count: int) -> DeviceMemory:
        """The part of one of `count` processes that share the memory alike."""
        return DeviceMemory(self.total_bytes // count, self.free_bytes // count, self.held_bytes)


def device_memory(device: Device) -> DeviceMemory:
    """Reads the memory of a device, after handing back what torch caches on a card."""
    if device.memory is not None:
        return device.memory
    if device.kind is DeviceKind.CUDA:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device.torch_device)
        return DeviceMemory(int(total), int(free), torch.cuda.memory_reserved(device.torch_device))
    available = available_bytes(device)
    return DeviceMemory(available, available, 0)


def allocated_bytes(device: Device) -> int:
    """What tensors of this process take on a card; 0 on a CPU, where nobody counts it."""
    return torch.cuda.memory_allocated(device.torch_device) if device.kind is DeviceKind.CUDA else 0


def available_bytes(device: Device) -> int:
    """Memory on `device` that can be allocated now without swapping."""
    if device.kind is DeviceKind.CUDA:
        free, _ = torch.cuda.mem_get_info(device.torch_device)
        return int(free)
    return min(_host_available_bytes(Path("/proc/meminfo")), _cgroup_headroom_bytes(Path("/sys/fs/cgroup")))


def _host_available_bytes(meminfo: Path) -> int:
    """`MemAvailable` if the kernel reports it, otherwise the physical memory."""
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_headroom_bytes(root: Path) -> int:
    """Bytes left below the container's limit; a very large number if there is none."""
    unlimited = 1 << 62
    for folder, limit_name, usage_name in (
        (root, "memory.max", "memory.current"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit_file, usage_file = folder / limit_name, folder / usage_name
        if limit_file.exists() and usage_file.exists():
            limit = limit_file.read_text().strip()
            if limit != "max":
                used = int(usage_file.read_text()) - _reclaimable_bytes(folder / "memory.stat")
                return max(0, min(unlimited, int(limit)) - max(0, used))
    return unlimited


def _reclaimable_bytes(stat: Path) -> int:
    """Cached file pages, which count as used but are reclaimed under memory pressure."""
    if stat.exists():
        for line in stat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0
