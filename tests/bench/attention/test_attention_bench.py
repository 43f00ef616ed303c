"""Attention is measured only where it is right, and everything that was asked to take part is in the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from sightline.attention.backends import registry
from sightline.attention.capability import Work
from sightline.attention.contract import AttentionPlan, SoftmaxInputs
from sightline.bench.attention import measure as attention_bench
from sightline.bench.attention import surroundings as surroundings_module
from sightline.bench.attention.contenders import Origin, selected, work_of
from sightline.bench.attention.flashinfer_peers import PEERS
from sightline.bench.attention.measure import measure_shape
from sightline.bench.attention.plot import plot_report
from sightline.bench.attention.results import ContenderState, Mode, Part, ShapeResult
from sightline.bench.attention.shapes import SHAPE_SETS, find_shapes
from sightline.bench.attention.timing import Clock, TimedTask, TimingBudget, time_in_turns
from sightline.kernels.paging import write_entries
from support.attention_contenders import (
    CPU,
    TORCH,
    TORCH_LATENT,
    StubPeer,
    VirtualClock,
    forget_the_write,
    give_garbage,
    measured,
    planted,
    stumble,
    text_of,
)


def test_every_contender_is_right_and_timed_and_in_the_table() -> None:
    asked = ("torch", "torch-latent", "reference", "reference-latent")
    report = measured("tiny", *(registry.find(name, registry.BUILT_IN) for name in asked), peers=PEERS)
    assert not report.is_red
    for result in report.shapes:
        names = {contender.name for contender in result.contenders}
        assert names == {*asked, "sdpa cudnn", "sdpa flash"}
        ours = [each for each in result.contenders if each.origin is Origin.OURS and each.state is ContenderState.RIGHT]
        assert len(ours) == 2
        assert [each.name for each in ours if each.is_selected] == [
            "torch" if result.shape.spec.kind.value == "softmax" else "torch-latent"
        ]
        assert all(each.best(Part.LAYER) is not None and each.plan is not None for each in ours)
    text = text_of(report)
    for name in ("torch", "reference-latent", "sdpa flash (peer)", "flash-mla is not compared", "of floor", "copy"):
        assert name in text


@pytest.mark.parametrize("fault", [give_garbage, forget_the_write])
def test_a_wrong_answer_is_red_and_has_no_time(fault: Callable[..., None]) -> None:
    report = measured("tiny-gqa-3x21", TORCH, planted("wrong", fault))
    assert report.is_red
    [result] = report.shapes
    right, wrong = result.contenders
    assert (right.state, wrong.state) == (ContenderState.RIGHT, ContenderState.WRONG)
    assert wrong.times is None
    assert wrong.plan is None
    assert "expected outputs within 0.0001 of the oracle, got one that is" in wrong.detail
    data = report.to_data()["shapes"][0]["contenders"][1]
    assert data["layer"]["eager"] is None
    assert "WRONG" in text_of(report)


def test_a_backend_that_raises_is_red_and_a_peer_that_raises_is_not() -> None:
    def raises(layer: int) -> Tensor:
        raise ImportError("libcuda.so.1")

    report = measured("tiny-gqa-3x21", TORCH, peers=(StubPeer("broken", raises),))
    assert not report.is_red
    assert [each.state for each in report.shapes[0].contenders] == [ContenderState.RIGHT, ContenderState.FAILED]
    assert "broken failed: ImportError: libcuda.so.1" in text_of(report)
    report = measured("tiny-gqa-3x21", planted("stumbles", stumble))
    assert report.is_red
    [stumbled] = report.shapes[0].contenders
    assert stumbled.detail.startswith("RuntimeError: no such kernel (in stumble, attention_contenders.py:")
    assert "Traceback" in stumbled.trace


def test_a_peer_with_a_wrong_answer_is_red() -> None:
    def zeros(layer: int) -> Tensor:
        return torch.zeros(3, 4, 16)

    report = measured("tiny-gqa-3x21", peers=(StubPeer("zeros", zeros),))
    assert report.is_red


def test_a_peer_that_is_not_installed_is_told_and_not_tried() -> None:
    def never(layer: int) -> Tensor:
        raise AssertionError("tried")

    report = measured("tiny-gqa-3x21", TORCH, peers=(StubPeer("absent", never, "package absent is not installed"),))
    assert report.missing_peers == {"absent": "package absent is not installed"}
    assert [each.name for each in report.shapes[0].contenders] == ["torch"]
    assert "absent is not compared: package absent is not installed" in text_of(report)


def test_a_shape_over_the_memory_bound_is_skipped_and_told() -> None:
    report = measured("tiny", TORCH, max_pool_bytes=20_000)
    assert {result.shape.name for result in report.shapes} < {shape.name for shape in SHAPE_SETS["tiny"]}
    assert all("GiB" in reason for reason in report.skipped_shapes.values())
    assert len(report.shapes) + len(report.skipped_shapes) == len(SHAPE_SETS["tiny"])


def test_a_device_that_fails_loses_nothing_that_was_measured_before(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def failing(*arguments: Any) -> ShapeResult:
        tried.append(arguments[0].name)
        if len(tried) == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return measure_shape(*arguments)

    monkeypatch.setattr(attention_bench, "measure_shape", failing)
    report = measured("tiny", TORCH, TORCH_LATENT)
    assert report.is_red
    assert len(report.shapes) == 3
    assert list(report.broken_shapes) == [tried[1]]
    assert "could not be measured: RuntimeError: CUDA error: an illegal memory access" in text_of(report)


def test_a_kernel_of_ours_is_the_layer_less_what_surrounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In virtual time: a layer takes 5 s, and each of the two writes around a kernel 1 s."""
    clock = VirtualClock()

    def slow_write(*arguments: Tensor) -> None:
        clock.now += 1.0
        write_entries(*arguments)

    def slow_run(plan: AttentionPlan[Any], layer: int, inputs: SoftmaxInputs, out: Tensor) -> None:
        clock.now += 5.0
        plan.run(layer, inputs, out)

    monkeypatch.setattr(attention_bench, "clock_of", lambda device: clock)
    monkeypatch.setattr(surroundings_module, "write_entries", slow_write)
    [contender] = measured("prefill-tiny-gqa-2x10", planted("slow", slow_run)).shapes[0].contenders
    assert contender.time(Part.LAYER, Mode.EAGER) == 5.0
    assert contender.time(Part.KERNEL, Mode.EAGER) == 3.0


def test_selection_is_asked_for_the_kind_of_rows() -> None:
    shapes = find_shapes(["gqa-1x8192", "mla16-8x2048", "gqa-256x2048", "prefill-gqa-1x8192"])
    assert [work_of(shape) for shape in shapes] == [Work.ALONE, Work.FEW, Work.DECODE, Work.PREFILL]
    assert selected((TORCH, TORCH_LATENT), SHAPE_SETS["tiny"][0], CPU) == "torch"
    assert selected((TORCH_LATENT,), SHAPE_SETS["tiny"][0], CPU) is None


def test_tasks_take_turns_and_slow_ones_fewer() -> None:
    ran: list[str] = []

    class Scripted(Clock):
        def seconds(self, work: Callable[[], object]) -> float:
            ran.append("|")
            work()
            return 0.6 if ran[-1] == "slow" else 0.004

    tasks = {name: TimedTask(lambda count, name=name: ran.extend([name] * count), 1) for name in ("quick", "slow")}  # type: ignore[misc]
    times = time_in_turns(tasks, Scripted(), TimingBudget(rounds=3, sample_seconds=0.008))
    assert times["quick"].num_samples == 3
    assert times["quick"].median == pytest.approx(0.002)
    assert times["slow"].num_samples == 1
    rounds = "".join(ran).split("|")[1:]
    assert [each or "" for each in rounds] == ["quickslow", "slow", "quickquick", "slow", "quickquick", "quickquick"]


def test_rounds_begin_at_different_tasks() -> None:
    ran: list[str] = []

    class Steady(Clock):
        def seconds(self, work: Callable[[], object]) -> float:
            work()
            return 0.1

    tasks = {name: TimedTask(lambda count, name=name: ran.append(name), 1) for name in "abc"}  # type: ignore[misc]
    time_in_turns(tasks, Steady(), TimingBudget(rounds=3, sample_seconds=0.1))
    assert "".join(ran[6:]) == "abcbcacab"


def test_the_report_as_data_says_everything() -> None:
    report = measured("tiny-gqa-3x21", TORCH, peers=PEERS)
    data = json.loads(json.dumps(report.to_data()))
    assert data["version"] == 1
    assert data["device"] == "cpu"
    assert {"torch", "python", "sightline"} <= set(data["environment"])
    assert data["rates"]["copy_bytes_per_second"] > 0
    assert len(data["missing_peers"]) + 2 == len(PEERS)
    [shape] = data["shapes"]
    assert (shape["shape"], shape["num_rows"], shape["length"], shape["num_layers"]) == ("tiny-gqa-3x21", 3, 21, 2)
    assert shape["kernel"]["bytes"] == 3 * 21 * 2 * 2 * 16 * 4
    assert shape["kernel"]["operations"] == 4 * 3 * 21 * 4 * 16
    torch_data = next(each for each in shape["contenders"] if each["name"] == "torch")
    assert torch_data["selected"]
    assert torch_data["state"] == "right"
    assert set(torch_data["layer"]["eager"]) == {"median_us", "low_us", "high_us", "num_samples"}
    assert torch_data["layer"]["graph"] is None
    assert torch_data["plan"]["median_us"] > 0
    assert torch_data["layer"]["of_floor"] > 0


def test_ratios_are_to_the_fastest_peer_in_the_same_mode() -> None:
    report = measured("prefill-tiny-gqa-2x10", TORCH, peers=PEERS)
    [result] = report.shapes
    ours = next(each for each in result.contenders if each.name == "torch")
    peer = next(each for each in result.contenders if each.name == "sdpa flash")
    own, fastest = ours.time(Part.LAYER, Mode.EAGER), peer.time(Part.LAYER, Mode.EAGER)
    assert own is not None
    assert fastest is not None
    assert result.ratio(ours, Part.LAYER, Mode.EAGER) == pytest.approx(fastest / own)
    assert result.ratio(peer, Part.LAYER, Mode.EAGER) == 1
    assert result.ratio(ours, Part.LAYER, Mode.GRAPH) is None
    assert "selected, × the fastest peer" in text_of(report)


def test_the_drawing_has_a_panel_a_family_and_a_floor() -> None:
    report = measured("tiny", TORCH, TORCH_LATENT, peers=PEERS)
    texts = [
        element.text for element in ElementTree.fromstring(plot_report(report)).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"tiny-gqa, decode", "tiny-gqa, prefill", "tiny-mla, decode", "sdpa flash", "torch-latent"} <= set(texts)
    assert texts.count("floor") == 4


def test_a_sweep_is_drawn_over_lengths_for_each_number_of_rows() -> None:
    report = measured("tiny-gqa-3x21", TORCH)
    [point] = report.shapes
    swept = tuple(
        replace(point, shape=replace(point.shape, num_rows=rows, length=length, is_swept=True))
        for rows in (1, 4)
        for length in (16, 32)
    )
    root = ElementTree.fromstring(plot_report(replace(report, shapes=swept)))
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"tiny-gqa, 1 rows", "tiny-gqa, 4 rows", "tokens per row", "16", "32"} <= texts
