"""The FlashAttention backends over a fake of the library that refuses what the real one refuses."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sightline.attention.backends.flash_attention.rows import LATENT_ROWS, ROWS
from sightline.attention.capability import Capability
from sightline.attention.contract import AttentionBackend
from sightline.attention.shared.merge import merge_states
from sightline.attention.spec import SoftmaxSpec
from sightline.core.batch import FULL
from sightline.core.device import Device, DeviceKind, lacks_products
from sightline.testing.conformance.kit import try_row
from sightline.testing.conformance.rig import AttentionRig, RigSetting, Row, Subject
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.steps import Step
from sightline.testing.conformance.trial import Effort, Trial
from support import fake_flash_attention

pytest.importorskip("triton")
CPU = Device(DeviceKind.CPU, torch.device("cpu"), "cpu", None)
BFLOAT16 = [row for row in ROWS if torch.bfloat16 in row.dtypes]
PLAIN, NINETY_SIX, CAPPED = BFLOAT16


def write_keys_values(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v)


def write_latents(latent: Tensor, k_rope: Tensor, entries: Tensor, slots: Tensor) -> None:
    entries.index_copy_(0, slots, torch.cat((latent, k_rope), dim=-1))


def on_cpu(row: Capability, **changes: Any) -> Capability:
    """The row as if the library were here, for fewer heads."""
    return replace(row, devices=frozenset({DeviceKind.CPU}), package=None, **changes)


@pytest.fixture
def configurations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """The fake in place; what it would have compiled for is told here."""
    found = fake_flash_attention.install(monkeypatch)
    softmax = importlib.import_module("sightline.attention.backends.flash_attention.backend")
    latent = importlib.import_module("sightline.attention.backends.flash_attention.latent_backend")
    monkeypatch.setattr(softmax, "write_keys_values", write_keys_values)
    monkeypatch.setattr(latent, "write_latents", write_latents)
    monkeypatch.setattr(latent, "merge_states", merge_states)
    return found


def softmax_backend() -> type[AttentionBackend[Any, Any]]:
    module = importlib.import_module("sightline.attention.backends.flash_attention.backend")
    backend: type[AttentionBackend[Any, Any]] = module.FlashAttentionBackend
    return backend


def latent_backend(room_bytes: int) -> type[AttentionBackend[Any, Any]]:
    module = importlib.import_module("sightline.attention.backends.flash_attention.latent_backend")
    return type("Roomed", (module.FlashAttentionLatentBackend,), {"room_bytes": room_bytes})


@pytest.mark.prove
@pytest.mark.usefixtures("configurations")
@pytest.mark.parametrize(
    ("row", "head_dim"),
    [
        (PLAIN, 64),
        pytest.param(NINETY_SIX, 96, marks=pytest.mark.slow),
        pytest.param(CAPPED, 128, marks=pytest.mark.slow),
    ],
    ids=["plain", "96", "softcap"],
)
def test_the_kit_passes(row: Capability, head_dim: int) -> None:
    narrow = on_cpu(row, head_dims=frozenset({head_dim}), group_sizes=frozenset({1, 2, 3}))
    report = try_row(Subject("flash-attention", softmax_backend(), narrow, CPU), Effort.QUICK)
    assert {result.check: (result.detail, result.case, result.trace) for result in report.failed} == {}


@pytest.mark.slow
@pytest.mark.skipif(lacks_products(CPU, torch.bfloat16), reason="a CPU without instructions for bf16 takes minutes")
@pytest.mark.usefixtures("configurations")
@pytest.mark.parametrize("room", [1 << 20, 40], ids=["one-shot", "chunks"])
def test_the_kit_passes_for_latent_attention(room: int) -> None:
    narrow = on_cpu(LATENT_ROWS[0], group_sizes=frozenset({2}))
    backend = latent_backend(room * 2 * (192 + 128) * 2)
    report = try_row(Subject("flash-attention-latent", backend, narrow, CPU), Effort.QUICK)
    assert {result.check: (result.detail, result.case, result.trace) for result in report.failed} == {}


def run_steps(spec: SoftmaxSpec, steps: Sequence[Sequence[Row]], page_size: int = 16) -> None:
    tried = Subject("flash-attention", softmax_backend(), on_cpu(PLAIN), CPU)
    trial = Trial(tried, Effort.QUICK, Samples())
    for rows in steps:
        setting = RigSetting(page_size=page_size, dtype=torch.bfloat16, max_rows=300, max_seq_len=256)
        trial.try_step(Step(AttentionRig(tried, [spec], setting), rows))


def test_lengths_make_no_configurations(configurations: list[tuple[object, ...]]) -> None:
    spec = SoftmaxSpec(4, 2, 64, 0.125)
    run_steps(spec, [[Row(0, 9)], [Row(0, 1)], [Row(5, 1), Row(31, 7)], [Row(7, 40)] * 3, [Row(0, 3), Row(0, 120)]])
    assert len(set(configurations)) == 2, "one over pages and one over the step's own keys"


def test_more_than_256_rows_are_one_configuration_more(configurations: list[tuple[object, ...]]) -> None:
    run_steps(SoftmaxSpec(1, 1, 64, 0.125), [[Row(3, 1)] * 2, [Row(3, 1)] * 257])
    assert len(set(configurations)) == 2


@pytest.mark.usefixtures("configurations")
@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (64, 9), (192, 9), (256, None), (256, 9)])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_no_page_is_loaded_whole(head_dim: int, window: int | None, page_size: int) -> None:
    spec = SoftmaxSpec(2, 1, head_dim, head_dim**-0.5, window=window)
    rows = [Row(65, 3), Row(1, 2), Row(9, 4, FULL), Row(0, 2, FULL)]
    run_steps(spec, [rows], page_size)


def test_the_fake_shows_a_page_that_is_loaded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flash_attention.install(monkeypatch)
    forward = importlib.import_module("flash_attn.cute.interface")._flash_attn_fwd
    k = torch.full((1, 128, 1, 64), torch.nan, dtype=torch.bfloat16)
    k[0, :5] = 1.0
    q, out = (torch.ones(1, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.tensor([0, 1, 5], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    places = {"cu_seqlens_q": lengths[:2], "seqused_k": lengths[2:], "softmax_scale": 1.0, "causal": True}
    forward(q, k, k, page_table=table, out=out, **places)
    assert out.isnan().all()
    forward(q, k.view(2, 64, 1, 64), k.view(2, 64, 1, 64), page_table=torch.tensor([[0, 1]]).int(), out=out, **places)
    assert (out == 1.0).all()
