"""Recurrent layers by fla-core and FlashInfer, over stand-ins that refuse what the libraries refuse."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from sightline.attention.backends.fla import rows as fla_rows
from sightline.attention.backends.flashinfer import rows as flashinfer_rows
from sightline.attention.capability import Capability
from sightline.attention.contract import AttentionBackend
from sightline.attention.spec import RecurrentSpec
from sightline.core.device import Device, DeviceKind
from sightline.testing.conformance.checks import CHECKS
from sightline.testing.conformance.kit import RowReport, try_row
from sightline.testing.conformance.rig import Subject
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.trial import Effort
from support import stand_in_recurrences
from support.case_marks import seldom
from support.recurrent_cases import GATED_DELTA, KIMI_DELTA, PLAIN, make_inputs
from support.recurrent_rig import StateCase, StateRig, StateStep, assert_step, expected

CPU = Device(DeviceKind.CPU, torch.device("cpu"), "cpu", None)
WAVES = "sightline.attention.recurrent.waves"
CALL = "sightline.attention.backends.fla.call"
KIMI = "sightline.attention.backends.fla.kimi_prompts"
FLA = "sightline.attention.backends.fla.recurrent_backend"
FLASHINFER = "sightline.attention.backends.flashinfer.recurrent_backend"
ROWS = {
    "gated delta rule of fla": (FLA, fla_rows.RECURRENT_ROWS[0], GATED_DELTA),
    "kimi delta attention of fla": (FLA, fla_rows.RECURRENT_ROWS[1], KIMI_DELTA),
    "lightning attention of fla": (FLA, fla_rows.RECURRENT_ROWS[2], PLAIN),
    "gated delta rule of flashinfer": (FLASHINFER, flashinfer_rows.RECURRENT_ROWS[0], GATED_DELTA),
}
STEPS = {
    "decode": [StateCase(1), StateCase(1, begins=True), StateCase(1)],
    "verification": [StateCase(4, frozenset(range(4))), StateCase(1), StateCase(3, frozenset(range(3)))],
    "prompts": [StateCase(70, begins=True), StateCase(9, begins=True), StateCase(1, begins=True)],
    "checkpoints": [StateCase(1), StateCase(40, frozenset({0, 15, 31})), StateCase(20, frozenset({15})), StateCase(2)],
    "empty rows": [StateCase(1), StateCase(0), StateCase(17), StateCase(0)],
    "nothing": [],
}
Backend = type[AttentionBackend[Any, Any]]


def backend_in(name: str) -> Backend:
    [backend] = [
        each for each in vars(importlib.import_module(name)).values()
        if inspect.isclass(each) and each.__module__ == name and issubclass(each, AttentionBackend)
    ]  # fmt: skip
    return backend


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-ins in place of both libraries, and adapters that were loaded over them."""
    stand_in_recurrences.install(monkeypatch)
    for name in (CALL, KIMI, FLA, FLASHINFER):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in (CALL, KIMI, FLA, FLASHINFER):
        sys.modules.pop(name, None)


pytestmark = pytest.mark.usefixtures("libraries")


def spec_of(name: str) -> RecurrentSpec:
    return replace(ROWS[name][2], key_dim=128, value_dim=128, scale=0.1)


def rig_of(name: str) -> StateRig:
    return StateRig(backend_in(ROWS[name][0]), spec_of(name), dtype=torch.bfloat16, num_slots=60)


@pytest.mark.parametrize(
    "transient", [False, pytest.param(True, marks=pytest.mark.prove)], ids=["with states", "without"]
)
@pytest.mark.parametrize("step_name", STEPS)
@pytest.mark.parametrize("name", ROWS)
def test_a_step_equals_the_oracle(name: str, step_name: str, transient: bool) -> None:
    step = StateStep(rig_of(name), STEPS[step_name], padding=(0, 0) if transient else (2, 3), transient=transient)
    assert_step(step, make_inputs(spec_of(name), step.num_tokens, decay=0.2, dtype=torch.bfloat16), 3e-2)


@pytest.mark.parametrize("name", ROWS)
def test_decays_may_be_infinite(name: str) -> None:
    step = StateStep(rig_of(name), [StateCase(20), StateCase(1)])
    inputs = make_inputs(spec_of(name), step.num_tokens, decay=0.2, dtype=torch.bfloat16)
    inputs.decay[3:5] = -torch.inf
    assert_step(step, inputs, 3e-2)


@pytest.mark.parametrize("what", ["query", "key", "value", "decay", "beta"])
@pytest.mark.parametrize("name", ROWS)
def test_a_row_that_is_not_finite_fails_alone(name: str, what: str) -> None:
    step = StateStep(rig_of(name), [StateCase(5), StateCase(70, frozenset({20})), StateCase(66), StateCase(2)])
    spec, spoiled = spec_of(name), slice(75, 141)
    inputs = make_inputs(spec, step.num_tokens, decay=0.2, dtype=torch.bfloat16)
    wanted = expected(step, inputs)
    keys = spec.num_key_heads * spec.key_dim
    parts = {"query": slice(0, keys), "key": slice(keys, 2 * keys), "value": slice(2 * keys, None)}
    values = vars(inputs)[what] if what in ("decay", "beta") else inputs.mixed[:, parts[what]]
    values[spoiled.start + 1 : spoiled.stop] = torch.nan
    found = step.run(inputs)
    assert found[spoiled.start + 1 : spoiled.stop].isnan().all()
    others = [token for token in range(step.num_tokens) if token not in range(spoiled.start, spoiled.stop)]
    torch.testing.assert_close(found[others].float(), wanted.out[others], atol=3e-2, rtol=3e-2)
    last = step.slots.written[spoiled.stop - 1]
    for slot, planes in wanted.kept.items():
        state = step.rig.pool.plane("state")[1, slot]
        assert slot != last or what == "query" or state.isnan().any()
        if slot != last:
            torch.testing.assert_close(state, planes["state"], atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("name", ROWS)
def test_rows_beyond_the_scratch_memory_are_computed_in_turns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waves = importlib.import_module(WAVES)
    planner = waves.WavePlanner
    small = 2 * 4 * spec_of(name).num_heads * 128 * 128

    def narrow(*given: Any, **options: Any) -> Any:
        return planner(*given, **options, scratch_bytes=small)

    rig_of(name)  # loads the adapter
    monkeypatch.setattr(importlib.import_module(ROWS[name][0]), "WavePlanner", narrow)
    step = StateStep(
        rig_of(name), [StateCase(3, frozenset({1})), StateCase(1), StateCase(20), StateCase(2), StateCase(1)]
    )
    assert [tile.num_rows for tile in step.plan().tiles] == [2, 2, 1]  # type: ignore[attr-defined]
    assert_step(step, make_inputs(spec_of(name), step.num_tokens, decay=0.2, dtype=torch.bfloat16), 3e-2)


def on_cpu(row: Capability) -> Capability:
    """The row as if the library were here, with fewer groups of heads."""
    groups = frozenset({1}) if row.group_sizes == frozenset({1}) else frozenset({1, 2})
    return replace(row, devices=frozenset({DeviceKind.CPU}), package=None, group_sizes=groups)


def tried(name: str, checks: tuple[str, ...] = ()) -> RowReport:
    module, row, _ = ROWS[name]
    subject = Subject(name, backend_in(module), on_cpu(row), CPU)
    chosen = [check for check in CHECKS if not checks or check.name in checks]
    return try_row(subject, Effort.QUICK, Samples(), chosen)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_the_kit_passes(name: str) -> None:
    report = tried(name)
    assert {result.check: (result.detail, result.case, result.trace) for result in report.failed} == {}


QUICK = (
    "built", "state-write", "state-read", "prompts", "ragged", "kept-places", "decays", "poisoned-slots",
    "strided-inputs", "plans-alive",
)  # fmt: skip
"""The last four are checks that FlashInfer's kernel failed on a card while its adapter gave it tensors as they came."""


@pytest.mark.prove
@pytest.mark.parametrize("name", seldom(ROWS, "kimi delta attention of fla", "gated delta rule of flashinfer"))
def test_the_checks_that_catch_faults_pass(name: str) -> None:
    report = tried(name, QUICK)
    assert {result.check: result.detail for result in report.failed} == {}
    assert len(report.results) == len(QUICK)


@dataclass(frozen=True)
class Fault:
    """A text of a module's source, and what stands there instead."""

    name: str
    module: str
    original: str
    planted: str


_FIRST = "behind = first_state(states, tile.read_slots, self.scratch[: tile.num_rows])"
FAULTS = {
    "state not gathered": Fault(
        "gated delta rule of fla", WAVES, _FIRST, "behind = self.scratch[: tile.num_rows].zero_()"
    ),
    "states of other rows gathered": Fault("kimi delta attention of fla", WAVES, _FIRST, f"{_FIRST}.flip(0)"),
    "state not turned": Fault("gated delta rule of flashinfer", FLASHINFER, "values_first=True", "values_first=False"),
    "state turned": Fault("gated delta rule of fla", FLA, "values_first=False", "values_first=True"),
    "decay of base 2": Fault(
        "gated delta rule of fla", CALL, "given.decay.clamp(min=_NOTHING_LEFT)",
        "(given.decay.clamp(min=_NOTHING_LEFT) * 1.442695)",
    ),
    "decay as a logarithm": Fault(
        "gated delta rule of flashinfer", FLASHINFER, "left = torch.exp(", "left = torch.abs("
    ),
    "beta where it is": Fault(
        "gated delta rule of flashinfer", FLASHINFER, "beta=aligned(given.beta)", "beta=given.beta.contiguous()"
    ),
    "neighbours read": Fault(
        "gated delta rule of flashinfer", FLASHINFER, "reads_beyond=True", "reads_beyond=False"
    ),
    "outputs of the first tokens": Fault(
        "gated delta rule of flashinfer", WAVES, "out[self.tokens.run]",
        "out[: self.tokens.run.stop - self.tokens.run.start]",
    ),
    "decays of base e": Fault("kimi delta attention of fla", KIMI, "scale=RCP_LN2", "scale=1.0"),
    "final state not written": Fault(
        "lightning attention of fla", WAVES, "wave.kept.put(states.state, behind)", "pass"
    ),
    "segment begins with the state of the row": Fault(
        "gated delta rule of fla", WAVES, "behind = self._run_wave(wave, inputs, behind, out)",
        f"{_FIRST}; behind = self._run_wave(wave, inputs, behind, out)",
    ),
    "whole values stored": Fault(
        "lightning attention of fla", CALL, "(v * beta.unsqueeze(-1)).to(v.dtype)", "v"
    ),
}  # fmt: skip


SLOWER = ("segment begins with the state of the row", "states of other rows gathered", "decay of base 2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.prove] if name in SLOWER else []) for name in FAULTS]
)
def test_the_kit_refuses_a_wrong_adapter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    plant(fault, monkeypatch)
    failed = tried(fault.name, QUICK).failed
    assert failed
    assert all("expected" in result.detail for result in failed)


def plant(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads the adapters anew, with the fault in one of their modules."""
    kernel = importlib.import_module(WAVES).split_mixed
    for name in (WAVES, KIMI, CALL, FLA, FLASHINFER):
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        source = Path(found.origin).read_text()
        if name == fault.module:
            assert source.count(fault.original) == 1
            source = source.replace(fault.original, fault.planted)
        module = ModuleType(name)
        vars(module).update({"__file__": found.origin, "__spec__": found})
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(source, found.origin, "exec"), vars(module))
        if name == WAVES:
            vars(module)["split_mixed"] = kernel


def functions_of(package: str, path: str) -> dict[str, ast.FunctionDef] | None:
    """The functions of a file of an installed package, which is not imported; None if it is not there."""
    for entry in map(Path, sys.path):
        if (entry / package / path).is_file():
            tree = ast.parse((entry / package / path).read_text())
            return {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    return None


def parameters(function: Callable[..., Any] | ast.FunctionDef) -> list[str]:
    if isinstance(function, ast.FunctionDef):
        given = function.args
        return [each.arg for each in (*given.args, *given.kwonlyargs, *([given.kwarg] if given.kwarg else []))]
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("module", stand_in_recurrences.FLA)
def test_the_stand_in_takes_what_fla_takes(module: str) -> None:
    for file, stand_in in stand_in_recurrences.FLA[module]:
        found = functions_of("fla", f"ops/{module.rsplit('.', 1)[1]}/{file}.py")
        if found is None:
            pytest.skip("needs fla-core on the path")
        assert parameters(found[stand_in.__name__]) == parameters(stand_in)


@pytest.mark.parametrize("file", stand_in_recurrences.FLASHINFER)
def test_the_stand_in_takes_what_flashinfer_takes(file: str) -> None:
    found, stand_in = functions_of("flashinfer", f"{file}.py"), stand_in_recurrences.FLASHINFER[file]
    if found is None:
        pytest.skip("needs FlashInfer on the path")
    assert parameters(found[stand_in.__name__.removeprefix("flashinfer_")]) == parameters(stand_in)
