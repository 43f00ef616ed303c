"""FlashInfer itself, each of its wrappers once, before the whole kit is run: `sightline conformance flashinfer`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from sightline.attention.backends.flashinfer.rows import LATENT_ROWS, ROWS
from sightline.attention.kinds import Feature
from sightline.attention.spec import AttentionSpec, SoftmaxSpec
from sightline.cache.layout import Layout
from sightline.core.batch import FULL
from sightline.core.device import detect_device
from sightline.testing.conformance.given_inputs import to_device
from sightline.testing.conformance.rig import AttentionRig, RigSetting, Row, Subject, Unused
from sightline.testing.conformance.steps import Step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed"),
    # Of the library's own imports.
    pytest.mark.filterwarnings("ignore"),
]

SOFTMAX = SoftmaxSpec(8, 2, 128, 128**-0.5)
LSE = frozenset({Feature.LSE})
DECODE = [Row(0, 1), Row(63, 1), Row(64, 1), Row(1000, 1), Row(5, 1)]
PREFILL = [Row(70, 30), Row(0, 130), Row(500, 1), Row(3, 200)]
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


def subject(name: str) -> Subject:
    latent = name == "flashinfer_latent"
    place = "latent_backend" if latent else "backend"
    module = importlib.import_module(f"sightline.attention.backends.flashinfer.{place}")
    backend = module.FlashInferLatentBackend if latent else module.FlashInferBackend
    return Subject(name, backend, LATENT_ROWS[0] if latent else ROWS[0], detect_device("cuda"))


def bench(name: str, spec: AttentionSpec, **changes: Any) -> AttentionRig:
    setting = RigSetting(
        page_size=64, dtype=torch.bfloat16, layout=Layout.SHUFFLED, unused=Unused.NAN, max_seq_len=2048, max_rows=16
    )
    return AttentionRig(subject(name), [spec], replace(setting, **changes))


def latent_spec(heads: int) -> AttentionSpec:
    spec: AttentionSpec = subject("flashinfer_latent").problem.spec(576, heads, 1)
    return spec


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest; NaN where there is one."""
    return float((got.float() - expected.float()).abs().max()) if got.numel() else 0.0


def check(step: Step, needs: frozenset[Feature] = frozenset()) -> None:
    real = sum(row.query_len for row in step.rows)
    answer, expected = step.run(needs), step.expected()
    offset, wrong = 0, {}
    for index, row in enumerate(step.rows):
        tokens = slice(offset, offset + row.query_len)
        offset += row.query_len
        wrong[f"row {index} ({row.context_len}+{row.query_len})"] = difference(answer.out[tokens], expected.out[tokens])
    limit = TOLERANCE[step.bench.setting.dtype]
    assert {name: value for name, value in wrong.items() if not value <= limit} == {}
    assert bool(answer.out[real:].isnan().all())
    if needs:
        assert answer.lse is not None
        assert expected.lse is not None
        assert difference(answer.lse[:real], expected.lse) <= limit
    assert not step.batch.pools or step.unwritten() is None


@pytest.mark.parametrize("rows", [DECODE, PREFILL, [Row(0, 130), Row(0, 7)]], ids=("decode", "paged", "ragged"))
@pytest.mark.parametrize("needs", [frozenset(), LSE], ids=("plain", "lse"))
def test_softmax(rows: Sequence[Row], needs: frozenset[Feature]) -> None:
    check(Step(bench("flashinfer", SOFTMAX), rows), needs)


def test_softmax_padding_and_empty_rows() -> None:
    step = Step(bench("flashinfer", SOFTMAX), [Row(5, 0), Row(9, 1), Row(0, 0), Row(64, 1)])
    step.pad(2, 3, torch.nan)
    check(step)


def test_softmax_masks_of_both_kinds_and_a_step_without_a_pool() -> None:
    rig = bench("flashinfer", SOFTMAX)
    check(Step(rig, [Row(5, 40, FULL), Row(70, 30), Row(0, 3, FULL)]))
    check(Step(rig, [Row(0, 40), Row(0, 130), Row(0, 1)], transient=True), LSE)


@pytest.mark.parametrize("changes", [{"window": 50}, {"softcap": 2.0}], ids=("window", "softcap"))
def test_softmax_windows_and_softcaps(changes: dict[str, Any]) -> None:
    rig = bench("flashinfer", replace(SOFTMAX, **changes))
    check(Step(rig, DECODE))
    check(Step(rig, PREFILL, seed=1))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("rows", [DECODE, PREFILL], ids=("decode", "phases"))
def test_latent(heads: int, rows: Sequence[Row]) -> None:
    check(Step(bench("flashinfer_latent", latent_spec(heads)), rows), LSE)


def test_latent_without_a_pool() -> None:
    check(Step(bench("flashinfer_latent", latent_spec(16)), [Row(0, 140), Row(0, 1)], transient=True))


@pytest.mark.parametrize(("name", "heads"), [("flashinfer", 0), ("flashinfer_latent", 16), ("flashinfer_latent", 128)])
def test_a_captured_step_serves_later_plans(name: str, heads: int) -> None:
    spec = latent_spec(heads) if heads else SOFTMAX
    rig = bench(name, spec)
    step = Step(rig, [Row(7 * index, 1) for index in range(8)])
    inputs, out = to_device(step.inputs, rig.device), step.empty_out()
    slots = step.batch.pools[step.pool.key].write_slots
    planned = step.plan()
    with torch.inference_mode():
        planned.attend(0, inputs, out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            planned.attend(0, inputs, out)
        for seed, contexts in enumerate(([1000, 3, 64], [0] * 8, [], [5, 700])):
            other = Step(rig, [Row(context, 1) for context in contexts], seed=seed)
            other.pad(8 - len(contexts), 8 - len(contexts), torch.nan)
            rig.planner.plan(other.batch)
            slots.copy_(other.batch.pools[other.pool.key].write_slots)
            for field, tensor in vars(to_device(other.inputs, rig.device)).items():
                if tensor is not None:
                    vars(inputs)[field].copy_(tensor)
            out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            real, expected = len(contexts), other.expected().out
            assert difference(out[:real].cpu(), expected) <= TOLERANCE[torch.bfloat16]
            assert bool(out[real:].isnan().all())
            for table_row in other.table_rows:
                rig.store.close_row(table_row)
