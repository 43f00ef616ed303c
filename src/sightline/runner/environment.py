"""Collects facts about a machine for bug reports. Excludes names of users, hosts and paths."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

from sightline.attention.backends import registry
from sightline.core.device import available_bytes, detect_device, has_cuda
from sightline.runner.missing import missing_packages
from sightline.runner.quantised import has_cpu_kernels
from sightline.version import __version__

_NAMES = "torch numpy safetensors gguf tokenizers jinja2 numba triton transformers"
_KERNEL_LIBRARIES = "flashinfer-python flash-attn-4 fla-core tokenspeed-mla"
PACKAGES = (*_NAMES.split(), *_KERNEL_LIBRARIES.split())


def collect_environment() -> dict[str, str]:
    """Facts by name, in the order to print."""
    facts = {
        "sightline": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "cpu products": _cpu_products(),
        "torch threads": str(torch.get_num_threads()),
        "memory available": f"{available_bytes(detect_device('cpu')) / 2**30:.1f} GiB",
        "cuda": _cuda(),
    }
    device = detect_device("cuda" if has_cuda() else "cpu")
    missing = {f"missing {each.package}": each.text for each in missing_packages(registry.BUILT_IN, device)}
    return facts | {name: _version(name) for name in PACKAGES} | missing


def _cpu_products() -> str:
    """The instructions that multiply quantised weights."""
    if not has_cpu_kernels():
        return "torch's: numba is not installed"
    # Imported here: numba, with LLVM, is an extra.
    from sightline.kernels.cpu.processor import Processor

    processor = Processor.detect()
    return f"{processor.instructions.value} on {processor.name}"


def _cuda() -> str:
    if not has_cuda():
        return "not available"
    device = detect_device("cuda")
    return f"{device.name}, compute capability {device.compute_capability}, CUDA {torch.version.cuda}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
