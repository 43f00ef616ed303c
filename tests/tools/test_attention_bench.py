"""Attention is measured only where it is right, and everything that was asked to take part is in the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from torch import Tensor

from sightline.attention.backends import registry
from sightline.attention.backends.reference_backend import ReferenceBackend
from sightline.attention.backends.torch_backend import TorchBackend
from sightline.attention.backends.torch_latent_backend import TorchLatentBackend
from sightline.attention.buffers import PlanBuffers
from sightline.attention.capability import Work
from sightline.attention.contract import AttentionBackend, AttentionPlan, BackendContext, Lse, SoftmaxInputs, StepView
from sightline.attention.selection import Candidate
from sightline.attention.spec import SoftmaxSpec
from sightline.cli import app
from sightline.core.device import detect_device
from sightline.core.errors import ConfigError, SightlineError
from sightline.tools import attention_bench
from sightline.tools import attention_bench_surroundings as surroundings_module
from sightline.tools.attention_bench import Field, measure_attention, measure_shape
from sightline.tools.attention_bench_contenders import Origin, selected, work_of
from sightline.tools.attention_bench_data import ShapeData, build_data
from sightline.tools.attention_bench_plot import plot_report
from sightline.tools.attention_bench_report import render
from sightline.tools.attention_bench_results import AttentionReport, Mode, Part, ShapeResult, State
from sightline.tools.attention_bench_shapes import SHAPE_SETS, SWEEP_SETS, Shape, find_shapes
from sightline.tools.attention_bench_surroundings import surround
from sightline.tools.attention_bench_timing import Effort, HostClock, Rates, Task, time_in_turns
from sightline.tools.attention_peers import AttentionPeer, PeerKernel
from sightline.tools.attention_peers_registry import PEERS
from support.dense_attention import attend_dense

CPU = detect_device("cpu")
QUICK = Effort(rounds=2, sample_seconds=1e-4)
MEASURED = Rates(bytes_per_second=4.28e12, operations_per_second=694e12)
"""Of the machine that the peers were first measured on."""


class _Changed(AttentionPlan[SoftmaxInputs]):
    """A plan with a fault."""

    def __init__(self, plan: AttentionPlan[SoftmaxInputs], fault: Callable[..., None]) -> None:
        self._plan, self._fault = plan, fault

    def prepare(self) -> None:
        self._plan.prepare()

    def run(self, layer: int, inputs: SoftmaxInputs, out: Tensor) -> Lse | None:
        self._fault(self._plan, layer, inputs, out)
        return None


def planted(name: str, fault: Callable[..., None]) -> Candidate:
    """The torch backend with a fault."""

    class Planted(AttentionBackend[SoftmaxSpec, SoftmaxInputs]):
        capabilities = TorchBackend.capabilities

        def __init__(self, context: BackendContext[SoftmaxSpec]) -> None:
            self._right = TorchBackend(context)

        def plan(self, step: StepView, buffers: PlanBuffers) -> AttentionPlan[SoftmaxInputs]:
            return _Changed(self._right.plan(step, buffers), fault)

    return Candidate.of(name, Planted, "tests", by_default=False)


def give_garbage(plan: AttentionPlan[Any], layer: int, inputs: SoftmaxInputs, out: Tensor) -> None:
    plan.run(layer, inputs, out)
    out.mul_(1.01)


def forget_the_write(plan: AttentionPlan[Any], layer: int, inputs: SoftmaxInputs, out: Tensor) -> None:
    plan.run(layer, replace(inputs, v=inputs.v * 0), out)


def stumble(plan: AttentionPlan[Any], layer: int, inputs: SoftmaxInputs, out: Tensor) -> None:
    raise RuntimeError("no such kernel")


TORCH = Candidate.of("torch", TorchBackend, "sightline", by_default=True)
TORCH_LATENT = Candidate.of("torch-latent", TorchLatentBackend, "sightline", by_default=True)


class StubPeer(AttentionPeer):
    """A peer on the CPU that computes with whatever a test gives it."""

    forms = frozenset((shape.spec.kind, shape.row_kind) for shape in SHAPE_SETS["tiny"])
    devices = frozenset({CPU.kind})

    def __init__(self, name: str, run: Callable[[int], Tensor], missing: str | None = None) -> None:
        self.name, self._run, self._missing = name, run, missing

    def missing(self) -> str | None:
        return self._missing

    def kernel(self, data: ShapeData, surroundings: surroundings_module.Surroundings) -> PeerKernel:
        return PeerKernel(self._run)


def measured(
    shapes: str, *candidates: Candidate, peers: tuple[AttentionPeer, ...] = (), max_pool_bytes: int | None = None
) -> AttentionReport:
    everybody = Field(CPU, candidates, (TORCH, TORCH_LATENT), peers, QUICK, max_pool_bytes)
    return measure_attention(find_shapes(shapes.split(",")), everybody, lambda result, seconds: None)


def text_of(report: AttentionReport) -> str:
    console = Console(file=StringIO(), width=240)
    with console.capture() as captured:
        console.print(render(report))
    return captured.get()


@pytest.mark.parametrize(
    ("name", "seconds", "bound", "share"),
    [
        ("gqa-256x2048", 507.6e-6, "bytes", 0.988),
        ("gqa-64x4096", 261.1e-6, "bytes", 0.960),
        ("mla128-128x4096", 281.9e-6, "operations", 0.746),
        ("mla128-16x32768", 277.0e-6, "operations", 0.759),
        ("mla128-32x4096", 81.2e-6, "operations", 0.648),
        ("mla16-128x4096", 158.3e-6, "bytes", 0.891),
        ("prefill-gqa-1x8192", 0.5498e12 / 631e12, "operations", 0.909),
        ("prefill-mla128-1x4096", 0.6873e12 / 605e12, "operations", 0.872),
    ],
)
def test_the_floor_is_the_one_that_peers_were_first_compared_with(
    name: str, seconds: float, bound: str, share: float
) -> None:
    [shape] = find_shapes([name])
    assert MEASURED.floor(shape.attention) / seconds == pytest.approx(share, abs=2e-3)
    assert MEASURED.is_bound_by_bytes(shape.attention) == (bound == "bytes")


def test_a_layer_costs_more_than_its_attention() -> None:
    [shape] = find_shapes(["mla128-1x8192"])
    weights = 128 * (128 + 128) * 512
    assert shape.layer.num_bytes == shape.attention.num_bytes + 576 * 2 + weights * 2
    assert shape.layer.operations == shape.attention.operations + 2 * weights
    [softmax] = find_shapes(["gqa-64x4096"])
    assert softmax.layer.num_bytes - softmax.attention.num_bytes == 64 * 2 * 8 * 128 * 2


def test_the_tables_hold_every_shape_once() -> None:
    assert len(SHAPE_SETS["decode"]) == 10
    assert len(SHAPE_SETS["prefill"]) == 4
    both = find_shapes(["decode", "prefill", "gqa-256x2048"])
    assert len({shape.name for shape in both}) == len(both) == 14
    assert all(shape.page_size == 64 and shape.dtype is torch.bfloat16 for shape in both)
    swept = find_shapes(SWEEP_SETS)
    assert {(shape.num_rows, shape.length) for shape in swept} >= {(1, 512), (8, 32768), (256, 2048)}


def test_an_unknown_shape_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"out of the sets decode, prefill, tiny, .* got 'huge'"):
        find_shapes(["tiny", "huge"])


def test_every_contender_is_right_and_timed_and_in_the_table() -> None:
    report = measured("tiny", *registry.BUILT_IN, peers=PEERS)
    assert not report.is_red
    for result in report.shapes:
        names = {contender.name for contender in result.contenders}
        assert names == {candidate.name for candidate in registry.BUILT_IN} | {"sdpa cudnn", "sdpa flash"}
        ours = [each for each in result.contenders if each.origin is Origin.OURS and each.state is State.RIGHT]
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
    assert (right.state, wrong.state) == (State.RIGHT, State.WRONG)
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
    assert [each.state for each in report.shapes[0].contenders] == [State.RIGHT, State.FAILED]
    assert "broken failed: ImportError: libcuda.so.1" in text_of(report)
    report = measured("tiny-gqa-3x21", planted("stumbles", stumble))
    assert report.is_red
    [stumbled] = report.shapes[0].contenders
    assert stumbled.detail.startswith("RuntimeError: no such kernel (in stumble, test_attention_bench.py:")
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


def test_a_kernel_of_ours_is_the_layer_less_what_surrounds_it() -> None:
    report = measured("prefill-tiny-gqa-2x10", Candidate.of("slow", ReferenceBackend, "", by_default=True))
    [contender] = report.shapes[0].contenders
    layer, kernel = contender.time(Part.LAYER, Mode.EAGER), contender.time(Part.KERNEL, Mode.EAGER)
    assert layer is not None
    assert kernel is not None
    assert 0 < kernel < layer


@pytest.mark.parametrize("shape", SHAPE_SETS["tiny"], ids=lambda shape: shape.name)
def test_what_surrounds_a_kernel_makes_a_layer_of_it(shape: Shape) -> None:
    """Attention as the forms state it, by torch, inside the surroundings that peers get."""
    data = build_data(shape, CPU, 3)
    data.forget()
    around = surround(data)
    around.before(2)
    assert data.error(around.after(2, _attend(data, around, 2))) < data.tolerance
    for plane in data.pool.spec.planes:
        assert not data.pool.plane(plane.name)[2].isnan().any()
        assert data.pool.plane(plane.name)[1].isnan().any()


def _attend(data: ShapeData, around: surroundings_module.Surroundings, layer: int) -> Tensor:
    """Row after row, of what a kernel reads."""
    shape, pool, rows = data.shape, data.pool, data.batch.rows
    tables = [pool.table.pages[row, : -(-shape.length // shape.page_size)] for row in rows]
    slots = [(t[:, None] * shape.page_size + torch.arange(shape.page_size)).flatten()[: shape.length] for t in tables]
    outs = []
    for row, places in enumerate(slots):
        tokens = slice(row * shape.query_len, (row + 1) * shape.query_len)
        match around:
            case surroundings_module.SoftmaxSurroundings(inputs=inputs, keys=keys, values=values):
                q, k, v = inputs.q[tokens], keys[layer, places], values[layer, places]
            case surroundings_module.AbsorbedSurroundings(query=query, latent_dim=latent_dim):
                entries = pool.plane("entry")[layer, places, None]
                q, k, v = query[tokens], entries, entries[..., :latent_dim]
            case surroundings_module.ExpandedSurroundings(q=q_all, keys=keys, values=values):
                q, k, v = q_all[tokens], keys[tokens], values[tokens]
        outs.append(attend_dense(q, k, v, shape.spec.scale))
    return torch.cat(outs)


def test_the_samples_reach_from_the_first_row_to_the_last() -> None:
    data = build_data(SHAPE_SETS["tiny"][1], CPU, 2)
    assert (data.samples[0].token, data.samples[-1].token) == (0, data.shape.num_tokens - 1)
    assert len(data.samples) == 8


def test_pages_lie_in_random_order() -> None:
    data = build_data(SHAPE_SETS["tiny"][0], CPU, 2)
    pages = [page for row in data.batch.rows for page in data.pool.table.owned(row)]
    assert sorted(pages) == list(range(1, len(pages) + 1))
    assert pages != sorted(pages)


def test_selection_is_asked_for_the_kind_of_rows() -> None:
    shapes = find_shapes(["gqa-1x8192", "gqa-256x2048", "prefill-gqa-1x8192"])
    assert [work_of(shape) for shape in shapes] == [Work.FEW, Work.DECODE, Work.PREFILL]
    assert selected((TORCH, TORCH_LATENT), SHAPE_SETS["tiny"][0], CPU) == "torch"
    assert selected((TORCH_LATENT,), SHAPE_SETS["tiny"][0], CPU) is None


def test_tasks_take_turns_and_slow_ones_fewer() -> None:
    ran: list[str] = []

    class Scripted(HostClock):
        def seconds(self, work: Callable[[], object]) -> float:
            ran.append("|")
            work()
            return 0.6 if ran[-1] == "slow" else 0.004

    tasks = {name: Task(lambda count, name=name: ran.extend([name] * count), 1) for name in ("quick", "slow")}  # type: ignore[misc]
    times = time_in_turns(tasks, Scripted(), Effort(rounds=3, sample_seconds=0.008))
    assert times["quick"].num_samples == 3
    assert times["quick"].median == pytest.approx(0.002)
    assert times["slow"].num_samples == 1
    rounds = "".join(ran).split("|")[1:]
    assert [each or "" for each in rounds] == ["quickslow", "slow", "quickquick", "slow", "quickquick", "quickquick"]


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
    assert 0 < torch_data["layer"]["of_floor"] < 10


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
    assert {"tiny-gqa, 1 rows", "tiny-gqa, 4 rows", "tokens of a row", "16", "32"} <= texts


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "attention", "--rounds", "1", *arguments])


def test_the_command_prints_a_table_and_writes_its_files(tmp_path: Path) -> None:
    saved, drawn = tmp_path / "attention.json", tmp_path / "attention.svg"
    result = run("--shapes", "tiny-gqa-3x21", "--peers", "--json", str(saved), "--plot", str(drawn))
    assert result.exit_code == 0, result.output
    assert "* torch" in result.stdout
    assert "tiny-gqa-3x21: torch " in result.stderr
    assert "\x1b[" not in result.stdout
    assert json.loads(saved.read_text())["shapes"][0]["shape"] == "tiny-gqa-3x21"
    assert ElementTree.parse(drawn).getroot().tag.endswith("svg")


def test_json_without_a_file_takes_the_place_of_the_table() -> None:
    result = run("--shapes", "tiny-mla-3x21", "--json", "--backends", "reference-latent")
    assert result.exit_code == 0, result.output
    contenders = json.loads(result.stdout)["shapes"][0]["contenders"]
    assert [(each["name"], each["selected"]) for each in contenders] == [("reference-latent", False)]


def test_the_command_fails_where_an_answer_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "installed", lambda: (TORCH, TORCH_LATENT, planted("wrong", give_garbage)))
    result = run("--shapes", "tiny-gqa-3x21", "--backends", "torch,wrong")
    assert result.exit_code == 1
    assert "WRONG" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--shapes", "tiny,none"], "got 'none'"),
        (["--backends", "torch,none"], "expected an attention backend out of torch"),
        (["--device", "cuda"], "expected a CUDA device for --device cuda, got none"),
        (["--device", "tpu"], "expected --device auto, cpu or cuda, got 'tpu'"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(*arguments)
    assert isinstance(result.exception, SightlineError)
    assert text in str(result.exception)


def test_a_file_in_no_folder_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    result = run("--json", str(tmp_path / "none" / "file.json"))
    assert result.exit_code == 2
    assert "expected a file in a folder that exists" in result.output


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_tiny_shapes_are_right_on_a_gpu() -> None:
    device = detect_device("cuda")
    candidates = tuple(candidate for candidate in registry.installed() if candidate.by_default)
    shapes = tuple(replace(shape, dtype=torch.bfloat16) for shape in find_shapes(["tiny"]))
    everybody = Field(device, candidates, candidates, (), QUICK)
    report = measure_attention(shapes, everybody, lambda result, seconds: None)
    assert not report.is_red, text_of(report)
