"""Every built-in backend of latent attention on a CPU: itself, in Triton's interpreter, or over a stand-in library."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from sightline.attention.backends.registry import BUILT_IN
from sightline.attention.capability import ANY, Capability
from sightline.attention.contract import AttentionBackend, LatentInputs
from sightline.attention.kinds import SpecKind
from sightline.attention.selection import Candidate
from sightline.attention.spec import LatentSpec
from sightline.core.device import DeviceKind
from support import blackwell_adapters, fake_flash_attention, fake_flashinfer, torch_kernels

Backend = type[AttentionBackend[LatentSpec, LatentInputs]]


def serves(candidate: Candidate, kind: SpecKind) -> bool:
    return any(kind in row.spec_kinds for row in candidate.rows())


LATENT = {candidate.name: candidate for candidate in BUILT_IN if serves(candidate, SpecKind.LATENT)}
"""By name."""
ON_CPU = [name for name, each in LATENT.items() if any(DeviceKind.CPU in row.devices for row in each.rows())]
_PLACES = {
    "flashinfer-latent": "sightline.attention.backends.flashinfer.latent_backend",
    "flash_attention-latent": "sightline.attention.backends.flash_attention.latent_backend",
}
"""The modules of the backends whose library a stand-in replaces."""
STOOD_IN = (*_PLACES, *blackwell_adapters.LATENT_ADAPTERS)


def row_on_cpu(row: Capability) -> Capability:
    """The row as if it were for a CPU and any size: interpreter and stand-ins compute all of them alike."""
    return replace(
        row,
        devices=frozenset({DeviceKind.CPU}),
        compute_capabilities=ANY,
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        cache_dtypes=frozenset({torch.float32, torch.bfloat16}),
        head_dims=ANY,
        group_sizes=ANY,
        page_sizes=ANY,
        expanded_dims=ANY,
        package=None,
    )


@contextmanager
def latent_backend(name: str) -> Iterator[tuple[Backend, tuple[Capability, ...]]]:
    """The backend, and the rows with which it runs on a CPU."""
    candidate = LATENT[name]
    if name in ON_CPU:
        yield candidate.load(), candidate.rows()
        return
    if name in blackwell_adapters.LATENT_ADAPTERS:
        with blackwell_adapters.loaded() as adapters:
            yield adapters[name], (blackwell_adapters.row_on_cpu(name),)
        return
    with pytest.MonkeyPatch.context() as monkeypatch:
        if name in _PLACES:
            fake_flashinfer.install(monkeypatch)
            fake_flash_attention.install(monkeypatch)
            torch_kernels.install(monkeypatch)
            monkeypatch.delitem(sys.modules, _PLACES[name], raising=False)
            importlib.import_module(_PLACES[name])
        yield candidate.load(), (row_on_cpu(candidate.rows()[0]),)
        if name in _PLACES:
            sys.modules.pop(_PLACES[name], None)
