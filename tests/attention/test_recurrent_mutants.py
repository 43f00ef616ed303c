"""Faults planted in the source of the recurrent ops and their torch backends, each caught by the check it names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import pytest

from sightline.attention.contract import AttentionBackend
from support.recurrent_cases import CONVOLUTION, EVERYTHING, GATED_DELTA, MAMBA, make_convolution_inputs, make_inputs
from support.recurrent_rig import StateCase, StateRig, StateStep, assert_step

pytestmark = pytest.mark.prove
TOLERANCE = 2e-5
RECURRENT, TORCH = "sightline.attention.recurrent", "sightline.attention.backends.torch"
MODULES = (
    f"{RECURRENT}.segments",
    f"{RECURRENT}.layout",
    f"{RECURRENT}.convolution",
    f"{RECURRENT}.steps",
    f"{RECURRENT}.chunks",
    f"{RECURRENT}.run",
    f"{TORCH}.recurrent_backend",
    f"{TORCH}.convolution_backend",
)
"""Each imports only modules before it."""


class Backends(NamedTuple):
    """The backends as one set of modules defines them."""

    recurrent: type[AttentionBackend[Any, Any]]
    in_place: type[AttentionBackend[Any, Any]]
    """Reads large states in place, whatever their size."""
    convolution: type[AttentionBackend[Any, Any]]


def backends_in(modules: dict[str, ModuleType]) -> Backends:
    recurrent = vars(modules[f"{TORCH}.recurrent_backend"])["TorchRecurrentBackend"]

    class InPlace(recurrent):  # type: ignore[misc, valid-type]
        in_place_bytes: ClassVar[int] = 0

    return Backends(recurrent, InPlace, vars(modules[f"{TORCH}.convolution_backend"])["TorchConvolutionBackend"])


def decode(backends: Backends) -> None:
    step = StateStep(StateRig(backends.recurrent, GATED_DELTA), [StateCase(1)] * 3)
    assert_step(step, make_inputs(GATED_DELTA, step.num_tokens), TOLERANCE)


def decode_in_place(backends: Backends) -> None:
    step = StateStep(StateRig(backends.in_place, GATED_DELTA), [StateCase(1)] * 3)
    assert_step(step, make_inputs(GATED_DELTA, step.num_tokens), TOLERANCE)


def decode_with_a_skip(backends: Backends) -> None:
    step = StateStep(StateRig(backends.recurrent, MAMBA), [StateCase(1)] * 3)
    assert_step(step, make_inputs(MAMBA, step.num_tokens), TOLERANCE)


def verification(backends: Backends) -> None:
    step = StateStep(StateRig(backends.in_place, GATED_DELTA), [StateCase(4, frozenset(range(4)))] * 2)
    assert_step(step, make_inputs(GATED_DELTA, step.num_tokens), TOLERANCE)


def short_prompts(backends: Backends) -> None:
    """Only the last state is kept."""
    step = StateStep(StateRig(backends.in_place, GATED_DELTA), [StateCase(4)] * 2)
    assert_step(step, make_inputs(GATED_DELTA, step.num_tokens), TOLERANCE)


def ragged(backends: Backends) -> None:
    step = StateStep(StateRig(backends.recurrent, GATED_DELTA), [StateCase(70), StateCase(12), StateCase(130)])
    assert_step(step, make_inputs(GATED_DELTA, step.num_tokens, decay=0.1), TOLERANCE)


def ragged_with_everything(backends: Backends) -> None:
    step = StateStep(StateRig(backends.recurrent, EVERYTHING), [StateCase(70), StateCase(12)])
    assert_step(step, make_inputs(EVERYTHING, step.num_tokens, decay=0.1), TOLERANCE)


def checkpoints(backends: Backends) -> None:
    step = StateStep(StateRig(backends.recurrent, GATED_DELTA), [StateCase(40, frozenset({1, 20})), StateCase(9)])
    assert_step(step, make_inputs(GATED_DELTA, step.num_tokens, decay=0.1), TOLERANCE)


def weak_behind_strong(backends: Backends) -> None:
    step = StateStep(StateRig(backends.recurrent, GATED_DELTA), [StateCase(70)])
    inputs = make_inputs(GATED_DELTA, step.num_tokens, decay=0.01)
    inputs.decay[::3] = -60.0
    inputs.decay[20:64] = -0.0123
    assert_step(step, inputs, TOLERANCE)


def infinite_decay(backends: Backends) -> None:
    step = StateStep(StateRig(backends.recurrent, GATED_DELTA), [StateCase(30)])
    inputs = make_inputs(GATED_DELTA, step.num_tokens, decay=0.1)
    inputs.decay[4:8] = float("-inf")
    assert_step(step, inputs, TOLERANCE)


def spoilt_neighbour(backends: Backends) -> None:
    """The tokens of one row are not numbers. The oracle computes row by row."""
    step = StateStep(StateRig(backends.recurrent, GATED_DELTA), [StateCase(9), StateCase(20), StateCase(12)])
    inputs = make_inputs(GATED_DELTA, step.num_tokens, decay=0.1)
    inputs.mixed[:9] = float("nan")
    assert_step(step, inputs, TOLERANCE)


def short_convolutions(backends: Backends) -> None:
    step = StateStep(StateRig(backends.convolution, CONVOLUTION), [StateCase(1), StateCase(5, frozenset({1}))])
    assert_step(step, make_convolution_inputs(CONVOLUTION, step.num_tokens), TOLERANCE)


@dataclass(frozen=True)
class Mutant:
    """A text of a module's source, and what stands there instead."""

    module: str
    original: str
    planted: str
    caught_by: Callable[[Backends], None]


STEPS, CHUNKS, RUN, LAYOUT = (f"{RECURRENT}.{name}" for name in ("steps", "chunks", "run", "layout"))
SEGMENTS, CONVOLVE, BACKEND = f"{RECURRENT}.segments", f"{RECURRENT}.convolution", f"{TORCH}.recurrent_backend"
_UPDATE = "torch.mul(source, decay, out=target).addcmul_(key, value)"

MUTANTS = {
    "missed decay of a step": Mutant(STEPS, _UPDATE, "torch.addcmul(source, key, value, out=target)", decode),
    "decay after the update": Mutant(
        STEPS, _UPDATE, "torch.addcmul(source, key, value, out=target).mul_(decay)", decode
    ),
    "beta of a step dropped": Mutant(STEPS, "stored = stored * terms.betas[:, token]", "stored = stored * 1.0", decode),
    "recall of a step dropped": Mutant(STEPS, "stored - found[:, 1:]", "stored - 0.0 * found[:, 1:]", decode),
    "recall without decay": Mutant(STEPS, "found *= left", "found[:, :1] *= left", decode),
    "output in front of the update": Mutant(
        STEPS, "torch.addcmul(found[:, :1], terms.overlaps[:, token], stored)", "found[:, :1] + 0.0 * stored", decode
    ),
    "key heads of a step by modulo": Mutant(
        STEPS,
        "both.permute(0, 3, 1, 2, 4).unsqueeze(2).expand(-1, -1, spec.group_size, -1, -1, -1)",
        "both.permute(0, 3, 1, 2, 4).unsqueeze(1).expand(-1, spec.group_size, -1, -1, -1, -1)",
        decode,
    ),
    "read slot written in place": Mutant(
        RUN,
        "targets = slots.targets(token, plane, scratch)",
        "targets = sources",
        decode_in_place,
    ),
    "slot 0 written by a short row": Mutant(
        LAYOUT, "plane[slot] if slot else scratch[row]", "plane[slot]", short_prompts
    ),
    "slot 0 written by a checkpoint": Mutant(
        LAYOUT,
        "chosen = [index for index, token in enumerate(tokens) if slots[token]]",
        "chosen = [index for index, token in enumerate(tokens)]",
        ragged,
    ),
    "state of a guess one token off": Mutant(
        LAYOUT, "kept[row.first + token]", "kept[row.first + (token + 1) % row.length]", verification
    ),
    "state of a checkpoint one token off": Mutant(
        SEGMENTS, "(kept and kept[token])", "(kept and kept[token - 1])", checkpoints
    ),
    "state of another row read": Mutant(
        LAYOUT, ".of(self._states.read_slots)", ".of(self._states.read_slots).flip(0)", decode
    ),
    "state of another row read in place": Mutant(
        LAYOUT, "tuple(read[row.row] for row in rows)", "tuple(read[row.row - 1] for row in rows)", decode_in_place
    ),
    "state of another row kept": Mutant(
        RUN, "kept.put(states.state, rows)", "kept.put(states.state, rows.flip(0))", ragged
    ),
    "missed decay between chunks": Mutant(CHUNKS, "    state.mul_(terms.left[chunks].flatten(0, 1))\n", "", ragged),
    "decay of keys to the end of a chunk missed": Mutant(
        CHUNKS, "_decayed(spec, key, behind, ", "_decayed(spec, key, torch.ones_like(behind), ", ragged
    ),
    "beta of a chunk dropped": Mutant(
        CHUNKS, "(values - found[:, width:]).mul_(betas)", "(values - found[:, width:])", ragged
    ),
    "beta of the system dropped": Mutant(CHUNKS, "similar.mul_(betas)", "similar", ragged),
    "system not solved": Mutant(
        CHUNKS,
        "torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)",
        "wanted",
        ragged,
    ),
    "a token sees the next": Mutant(CHUNKS, ".triu(1)", ".triu(2)", ragged),
    "key heads of a chunk by modulo": Mutant(
        CHUNKS,
        "x.unsqueeze(2), left.view(*grouped, *left.shape[2:])",
        "x.repeat(1, spec.group_size, 1, 1).view(*grouped, *x.shape[2:]), left.view(*grouped, *left.shape[2:])",
        ragged,
    ),
    "sums of decays in fp32": Mutant(CHUNKS, "dtype=torch.float64", "dtype=torch.float32", weak_behind_strong),
    "infinite decays not bounded": Mutant(CHUNKS, ".clamp(min=_NOTHING_LEFT)", "", infinite_decay),
    "decay of a channel from the wrong half": Mutant(
        CHUNKS, "left_left *= whole_right", "left_left *= whole_left", ragged_with_everything
    ),
    "diagonal of the channels' scores missed": Mutant(
        CHUNKS,
        "    products[:, :, :, 0].diagonal(dim1=2, dim2=3).copy_((query * key).sum(-1))\n",
        "",
        ragged_with_everything,
    ),
    "unit length of a chunk dropped": Mutant(CHUNKS, "unit(both) if spec.unit_keys else both", "both", ragged),
    "unit length dropped": Mutant(STEPS, "if spec.unit_keys:", "if spec.unit_keys and False:", decode),
    "scale dropped": Mutant(RUN, "result = result * spec.scale", "result = result * 1.0", decode),
    "skip of a step dropped": Mutant(
        RUN, "result.addcmul_(value, inputs.skip.unsqueeze(-1))", "pass", decode_with_a_skip
    ),
    "skip of a chunk dropped": Mutant(
        RUN, "found.addcmul_(terms.values, inputs.skip.view(-1, 1, 1))", "pass", ragged_with_everything
    ),
    "convolution not activated": Mutant(
        RUN, "mixed, inputs.conv, activated=True", "mixed, inputs.conv, activated=False", decode
    ),
    "padding decays the state": Mutant(
        RUN, "decay.masked_fill(block.padding.view(*shape, *[1] * (decay.dim() - 2)), 0.0)", "decay", ragged
    ),
    "padding is stored": Mutant(RUN, "beta.masked_fill(block.padding.unsqueeze(-1), 0.0)", "beta", ragged),
    "padding from another row": Mutant(
        LAYOUT, "*[each.first] * (width - each.length)", "*[0] * (width - each.length)", spoilt_neighbour
    ),
    "tail not read": Mutant(
        LAYOUT,
        "return plane.index_select(0, self.read_slots)",
        "return plane[:1].expand(self.num_rows, -1, -1)",
        decode,
    ),
    "tail of other rows lost": Mutant(
        LAYOUT, "flat.view(self.num_rows, before, channels).copy_(tails.transpose(1, 2))", "pass", ragged
    ),
    "tail kept one token off": Mutant(
        LAYOUT, "window[:, :, token + 1 : token + width]", "window[:, :, token : token + width - 1]", decode
    ),
    "tail of a checkpoint kept one token off": Mutant(
        LAYOUT,
        "range(first + index + 1, first + index + 1 + before)",
        "range(first + index, first + index + before)",
        checkpoints,
    ),
    "tail not kept": Mutant(RUN, "self.windows.keep(states.tail, window, width)", "pass", checkpoints),
    "rows convolved across their border": Mutant(BACKEND, "else width - 1", "else width - 2", ragged),
    "taps in reverse": Mutant(
        CONVOLVE, "conv.weight.unsqueeze(1)", "conv.weight.flip(1).unsqueeze(1)", short_convolutions
    ),
    "bias dropped": Mutant(CONVOLVE, "out += conv.bias.unsqueeze(1)", "pass", short_convolutions),
    "bias of a long row dropped": Mutant(CONVOLVE, "part += conv.bias", "pass", ragged),
    "rows not ordered by their segments": Mutant(
        SEGMENTS, "    cut.sort(key=lambda each: -len(each[1]))\n", "", ragged
    ),
}
CHECKS = {mutant.caught_by.__name__: mutant.caught_by for mutant in MUTANTS.values()}


@pytest.mark.parametrize("name", CHECKS)
def test_the_backends_pass_the_checks(name: str) -> None:
    CHECKS[name](backends_in({module: importlib.import_module(module) for module in MODULES}))


@pytest.mark.parametrize("name", MUTANTS)
def test_the_check_catches_the_planted_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = backends_in(plant(MUTANTS[name], monkeypatch))
    with pytest.raises(AssertionError):
        MUTANTS[name].caught_by(planted)


def plant(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules with the fault in one of them: loaded anew, so that all of them import the faulty one."""
    modules = {}
    for name in MODULES:
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        source = Path(found.origin).read_text()
        if name == mutant.module:
            assert source.count(mutant.original) == 1
            source = source.replace(mutant.original, mutant.planted)
        modules[name] = importlib.util.module_from_spec(found)
        monkeypatch.setitem(sys.modules, name, modules[name])
        exec(compile(source, found.origin, "exec"), vars(modules[name]))
    return modules
