"""The adapters for Blackwell on a CPU, over stand-ins for their libraries."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from sightline.attention.backends.registry import BUILT_IN
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import ANY, Capability
from sightline.attention.contract import AttentionBackend
from sightline.attention.kinds import SpecKind
from sightline.attention.latent import extend
from sightline.attention.spec import AttentionSpec, LatentSpec, SoftmaxSpec
from sightline.core.device import DeviceKind
from sightline.testing.conformance.rig import AttentionRig, RigSetting, Subject
from support import fake_blackwell, torch_kernels
from support.attention_cases import CPU_DEVICE

_FOLDER = "sightline.attention.backends.flashinfer.blackwell"
PLACES = {
    "trtllm": f"{_FOLDER}.backend",
    "trtllm-latent": f"{_FOLDER}.trtllm_latent_backend",
    "cutedsl-latent": f"{_FOLDER}.cutedsl_latent_backend",
    "tokenspeed-latent": "sightline.attention.backends.tokenspeed.latent_backend",
}
"""The module of each adapter."""
ADAPTERS = tuple(PLACES)
LATENT_ADAPTERS = ADAPTERS[1:]
_OVER_LIBRARIES = (*PLACES.values(), f"{_FOLDER}.ragged")
"""Modules that hold functions of a library, and must be imported again over stand-ins."""
WORKSPACE_BYTES = 4 << 20
"""Scratch memory on a CPU, small enough that results with an LSE take several launches."""
CANDIDATES = {candidate.name: candidate for candidate in BUILT_IN if candidate.name in PLACES}
SPECS: dict[SpecKind, AttentionSpec] = {
    SpecKind.SOFTMAX: SoftmaxSpec(num_q_heads=4, num_kv_heads=2, head_dim=64, scale=0.15),
    SpecKind.LATENT: LatentSpec(
        num_q_heads=2, latent_dim=512, rope_dim=64, nope_dim=128, value_dim=128, scale=192**-0.5
    ),
}

Backend = type[AttentionBackend[Any, Any]]


@dataclass(frozen=True, eq=False)
class _TorchCall:
    scale: float
    queries: list[slice]
    keys: list[slice]
    causal: bool

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        lse = torch.empty(q.shape[:2])
        for tokens, span in zip(self.queries, self.keys, strict=True):
            found, own = fake_blackwell.attend(q[tokens], k[span], v[span], self.scale, causal=self.causal)
            out[tokens], lse[tokens] = found.to(out.dtype), own
        return lse


@dataclass(frozen=True, eq=False)
class TorchRagged:
    """Stands for `latent.extend.ExtendKernel`, which Triton's interpreter takes seconds for."""

    spec: LatentSpec
    dtype: torch.dtype
    shared_bytes: int

    def plan(
        self, name: str, query_lens: Sequence[int], key_lens: Sequence[int], *, causal: bool, buffers: PlanBuffers
    ) -> _TorchCall:
        del name, buffers
        queries, keys = (
            [slice(*ends) for ends in pairwise(accumulate(lens, initial=0))] for lens in (query_lens, key_lens)
        )
        return _TorchCall(self.spec.scale, queries, keys, causal)


@contextmanager
def loaded(*, with_triton: bool = False) -> Iterator[dict[str, Backend]]:
    """The adapters by name, over stand-ins. `with_triton` runs kernels of our own in Triton's interpreter."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake_blackwell.install(monkeypatch)
        if not with_triton:
            torch_kernels.install(monkeypatch)
            monkeypatch.setattr(extend, "ExtendKernel", TorchRagged)
        for place in _OVER_LIBRARIES:
            monkeypatch.delitem(sys.modules, place, raising=False)
        for place in PLACES.values():
            importlib.import_module(place)
        backends = {name: candidate.load() for name, candidate in CANDIDATES.items()}
        for backend in backends.values():
            if "workspace_bytes" in vars(backend):
                monkeypatch.setattr(backend, "workspace_bytes", WORKSPACE_BYTES)
        yield backends
        for place in _OVER_LIBRARIES:
            sys.modules.pop(place, None)


def row_on_cpu(name: str, index: int = 0) -> Capability:
    """A row of an adapter as if it were for a CPU. Page sizes, dtypes and dimensions stay as they are declared."""
    row = CANDIDATES[name].rows()[index]
    return replace(row, devices=frozenset({DeviceKind.CPU}), compute_capabilities=ANY, package=None, group_sizes=ANY)


def subject(name: str, backend: Backend, index: int = 0) -> Subject:
    """An adapter for a rig or the kit, with few heads of few sizes: the stand-ins compute all alike."""
    row = row_on_cpu(name, index)
    sizes = frozenset({2}) if SpecKind.LATENT in row.spec_kinds else frozenset({1, 4})
    dims = row.head_dims if SpecKind.LATENT in row.spec_kinds else frozenset({64})
    made = ANY if row.expanded_dims is ANY else frozenset({(192, 128)})
    return Subject(name, backend, replace(row, group_sizes=sizes, head_dims=dims, expanded_dims=made), CPU_DEVICE)


def rig_for(tried: Subject, spec: AttentionSpec | None = None, **setting: object) -> AttentionRig:
    """One layer in bf16; NaN in unused slots, and poison in leases that did not ask for zeros."""
    given: dict[str, object] = {
        "page_size": 32,
        "dtype": torch.bfloat16,
        "max_seq_len": 256,
        "max_rows": 8,
        "max_step_tokens": 192,
    }
    return AttentionRig(tried, [spec or SPECS[tried.kind]], RigSetting(**given | setting))  # type: ignore[arg-type]
