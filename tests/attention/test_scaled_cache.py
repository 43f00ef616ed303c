"""Softmax and latent attention over a cache of 8-bit floats, by the backends that come with Sightline."""

from __future__ import annotations

import pytest
import torch

from sightline.attention.backends.torch.backend import TorchBackend
from sightline.attention.backends.torch.latent_backend import TorchLatentBackend
from sightline.attention.groups import group_layers
from sightline.attention.latent.phases import Way
from sightline.attention.oracle.attention import loaded_entries, stored_entries
from sightline.attention.shared.entry_planes import PlainPlane, ScaledPlane, entry_planes
from sightline.attention.shared.tiles import RowSpan
from sightline.attention.spec import LatentSpec, SoftmaxSpec
from sightline.cache.layout import walk_slots
from sightline.core.device import detect_device
from sightline.testing.conformance.rig import AttentionRig, RigSetting, Row, Subject, as_bytes
from sightline.testing.conformance.steps import Step
from support import attention_cases as cases

FP8 = torch.float8_e4m3fn
SPEC = SoftmaxSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
WINDOWED = SoftmaxSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, window=5)
LATENT = LatentSpec(num_q_heads=3, latent_dim=16, rope_dim=4, nope_dim=8, value_dim=6, scale=0.31)
ROWS = [Row(0, 21), Row(5, 12), Row(17, 1), Row(0, 1)]


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.3])
def test_the_oracle_of_a_cache_rounds_to_the_nearest_and_saturates(scale: float) -> None:
    values = torch.tensor([0.0, 0.1, -1.0, 17.0, 447.0, 449.0, -1e9]) * scale
    kept = loaded_entries(stored_entries(values, FP8, scale), scale) / scale
    torch.testing.assert_close(kept, torch.tensor([0.0, 0.1015625, -1.0, 16.0, 448.0, 448.0, -448.0]))


def test_the_oracle_of_a_wide_cache_casts_and_no_more() -> None:
    values = torch.randn(5)
    assert torch.equal(stored_entries(values, torch.float32, 1.0), values)
    assert loaded_entries(values.bfloat16(), 1.0).dtype == torch.bfloat16


@pytest.mark.parametrize(("writer", "reader"), [("torch", "reference"), ("reference", "torch")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_one_backend_writes_in_8_bits_another_reads(writer: str, reader: str, dtype: torch.dtype) -> None:
    specs = [SPEC, WINDOWED, SPEC]
    setting = RigSetting(dtype=dtype, cache_dtype=FP8)
    bench = AttentionRig(cases.subject_for(writer, dtype), specs, setting)
    other = AttentionRig(cases.subject_for(reader, dtype), specs, setting)
    other.store = bench.store
    tolerance = 3e-5 if dtype is torch.float32 else 1e-2
    for layer in range(3):
        first = Step(bench, ROWS, layer=layer)
        first.run()
        second = first.next_step(2, seed=1)
        planned = other.another_planner().plan(second.batch)
        planned.prepare()
        got = second.attend(planned).out.float()
        torch.testing.assert_close(got, second.expected().out, atol=tolerance, rtol=tolerance)
        for table_row in first.table_rows:
            bench.store.close_row(table_row)


def test_a_wide_cache_goes_through_planes_that_do_nothing_more() -> None:
    for cache_dtype, kind in ((None, PlainPlane), (FP8, ScaledPlane)):
        pool, _ = cases.bench([SPEC], cache_dtype=cache_dtype).place_of(0)
        assert {type(plane) for plane in entry_planes(pool, "k")} == {kind}


def test_a_long_row_whose_pages_lie_side_by_side_is_converted_all_the_same() -> None:
    bench = cases.bench([SPEC], cache_dtype=FP8, layout=RigSetting().layout.IN_ORDER, max_seq_len=4096)
    step = Step(bench, [Row(3000, 1), Row(2000, 2)])
    torch.testing.assert_close(step.run().out, step.expected().out, atol=3e-5, rtol=3e-5)


def test_new_tokens_are_seen_as_the_cache_keeps_them() -> None:
    bench = cases.bench([SPEC], cache_dtype=FP8)
    step = Step(bench, [Row(0, 9)])
    exact = Step(bench, [Row(0, 9)], transient=True)
    assert torch.equal(step.inputs.k, exact.inputs.k)
    torch.testing.assert_close(step.run().out, step.expected().out, atol=3e-5, rtol=3e-5)
    assert (step.expected().out - exact.run().out).abs().max() > 1e-3, "8 bits would not show in this test"


def forced(way: Way, room: int) -> type[TorchLatentBackend]:
    def choose(spec: LatentSpec, span: RowSpan, available: int) -> Way:
        del spec, span, available
        return way

    num_bytes = room * LATENT.num_q_heads * (LATENT.nope_dim + LATENT.rope_dim + LATENT.value_dim) * 4
    return type("Forced", (TorchLatentBackend,), {"choose": staticmethod(choose), "room_bytes": num_bytes})


@pytest.mark.parametrize(("way", "room"), [(Way.ABSORBED, 512), (Way.ONE_SHOT, 512), (Way.CHUNKED, 7)])
def test_every_way_of_latent_attention_reads_8_bits(way: Way, room: int) -> None:
    backend = forced(way, room)
    subject = Subject("forced", backend, backend.capabilities[0], detect_device("cpu"))
    bench = AttentionRig(subject, [LATENT, LATENT], RigSetting(cache_dtype=FP8))
    for layer in range(2):
        step = Step(bench, ROWS, layer=layer, seed=layer)
        torch.testing.assert_close(step.run().out, step.expected().out, atol=1e-4, rtol=1e-4)
        assert step.unwritten() is None
        follow = step.next_step(3, seed=5)
        torch.testing.assert_close(follow.run().out, follow.expected().out, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scales", [(1.0,), (0.5, 0.25), (0.3, 0.07)])
def test_another_scale_stores_other_bytes_of_the_same_entries(scales: tuple[float, ...]) -> None:
    bench = cases.bench([SPEC], cache_dtype=FP8, cache_scales=scales)
    step = Step(bench, [Row(0, 9)])
    step.run()
    slots = walk_slots(step.pool, step.table_rows[0], 9)
    for name, scale, values in zip("kv", (scales * 2)[:2], (step.inputs.k, step.inputs.v), strict=True):
        stored = as_bytes(step.pool.plane(name)[0])[slots].view(FP8).float()
        torch.testing.assert_close(stored * scale, values, rtol=2.0**-4 + 1e-3, atol=2.0**-10 * scale)


def test_the_torch_backends_declare_8_bits_beside_their_own_dtype() -> None:
    for backend in (TorchBackend, TorchLatentBackend):
        for row in backend.capabilities:
            assert row.cache_dtypes == row.dtypes | {FP8}


def test_groups_take_their_own_layers_scales() -> None:
    full, windowed = group_layers([SPEC, WINDOWED, SPEC])
    scales = {"k": (1.0, 2.0, 3.0), "v": (4.0, 5.0, 6.0)}
    [pool] = full.cache_spec(FP8, scales).pools
    assert [plane.scales for plane in pool.planes] == [(1.0, 3.0), (4.0, 6.0)]
    [pool] = windowed.cache_spec(FP8, scales).pools
    assert [plane.scales for plane in pool.planes] == [(2.0,), (5.0,)]
    [pool] = full.cache_spec(FP8).pools
    assert [plane.scales for plane in pool.planes] == [None, None]
