"""Faults planted in the CPU kernels of attention: a check of the kit, or long contexts, catch each of them."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("numba")

from sightline.attention.backends.numba import calls
from sightline.attention.backends.numba.backend import NumbaBackend
from sightline.attention.backends.numba.latent_backend import NumbaLatentBackend
from sightline.core.device import Device, DeviceKind
from sightline.kernels.cpu import attend_kernel, attend_prompt, attend_tiles, latent, prompt_tiles
from sightline.testing.conformance.checks import CHECKS
from sightline.testing.conformance.kit import try_row
from sightline.testing.conformance.rig import Subject
from sightline.testing.conformance.trial import Effort
from support.cpu_attention import Heads, attended

pytestmark = pytest.mark.prove
CPU = Device(DeviceKind.CPU, torch.device("cpu"), "cpu", None)


LONG_CONTEXTS, LONG_PROMPTS = "contexts of several blocks and splits", "prompts of several blocks and units"


class Fault(NamedTuple):
    module: ModuleType
    original: str
    """A piece of source that occurs once."""
    replacement: str
    check: str
    """The check of the kit that fails, LONG_CONTEXTS or LONG_PROMPTS."""
    backend: Any = NumbaBackend


FAULTS = {
    "keys behind the end of a page are read from the memory behind it": Fault(
        attend_kernel,
        "end = emitter.smaller(emitter.add(begin, given.page_size), stop)",
        "end = emitter.smaller(emitter.add(begin, emitter.times(given.page_size, 2)), stop)",
        "context",
    ),
    "the key that completes a tile has weight": Fault(
        attend_kernel,
        "limit = emitter.splat(build.trunc(build.sub(stop, first), I32), _WIDTH)",
        "limit = emitter.splat(build.trunc(emitter.add(stop, emitter.number(1)), I32), _WIDTH)",
        "context",
    ),
    "sums are not rescaled when a larger score comes": Fault(
        attend_kernel,
        'fcmp_unordered("!=", kept, emitter.constant(F32, 1.0))',
        'fcmp_ordered("!=", kept, kept)',
        LONG_CONTEXTS,
    ),
    "parts are merged without their weight": Fault(
        attend_kernel,
        "each.keep(kept, each.weight)",
        "each.keep(emitter.constant(F32, 1.0), each.weight)",
        LONG_CONTEXTS,
    ),
    "the last split is lost": Fault(
        attend_kernel,
        "share = emitter.divided_up(build.sub(end, start), num_splits)",
        "share = build.sdiv(build.sub(end, start), emitter.add(num_splits, emitter.number(1)))",
        LONG_CONTEXTS,
    ),
    "the sink is forgotten": Fault(
        attend_kernel,
        "emitter.set(weight, power_of_two(build, build.fsub(emitter.get(sink), base)))",
        "emitter.set(weight, zero)",
        "features-together",
    ),
    "a tree sees all new tokens": Fault(
        attend_kernel,
        "emitter.set(sees, build.zext(build.and_(is_near, in_tree), I64))",
        "emitter.set(sees, build.zext(is_near, I64))",
        "tree-mask",
    ),
    "padding is computed": Fault(
        attend_kernel,
        'with emitter.when(build.icmp_signed(">=", end, emitter.number(0))):\n            first, stop',
        'with emitter.when(build.icmp_signed(">=", end, emitter.number(-1))):\n            first, stop',
        "covering",
    ),
    "dimensions behind the last whole line are dropped": Fault(
        attend_tiles, "if whole < dims:", "if whole > dims:", "context"
    ),
    "dimensions of values that do not fill the registers are dropped": Fault(
        attend_tiles, "for piece in pieces(dims - whole, width):", "for piece in pieces(0, width):", "context"
    ),
    "the addresses of a tile are those of the one before": Fault(
        attend_tiles,
        "near = rows.tile(emitter, emitter.add(place, emitter.number(KEYS)))",
        "near = rows.tile(emitter, place)",
        LONG_CONTEXTS,
    ),
    "a stretch goes on behind the rows of its block": Fault(
        attend_kernel,
        "stop = emitter.smaller(emitter.add(first, stretch), padded)",
        "stop = emitter.add(first, stretch)",
        LONG_CONTEXTS,
    ),
    "the cap of scores is in other units than the scores": Fault(
        attend_kernel,
        "cap = build.fmul(_float(emitter, bits), emitter.constant(F32, LOG2_E))",
        "cap = _float(emitter, bits)",
        "features-together",
    ),
    "the last queries of a group are those of the first tile": Fault(
        attend_tiles, "yield nullcontext(emitter.number(whole))", "yield nullcontext(emitter.number(0))", "context"
    ),
    "keys before the window are in the first block": Fault(
        attend_prompt, "low = emitter.larger(start, origin)", "low = origin", LONG_PROMPTS
    ),
    "all queries of a tile see what the last one sees": Fault(
        attend_prompt, "*seen(own), begin_key", "begin_key, end_key, begin_key", LONG_PROMPTS
    ),
    "a tile's keys end with those of its first query": Fault(
        attend_prompt, "seen(emitter.add(query, emitter.number(QUERIES - 1)))[1]", "seen(query)[1]", LONG_PROMPTS
    ),
    "the tokens of the last share are lost": Fault(
        attend_prompt,
        "highest = emitter.share(emitter.times(emitter.get(work), given.num_kv_heads), thread, num_threads)",
        "highest = emitter.share(emitter.get(work), thread, num_threads)",
        LONG_PROMPTS,
    ),
    "units overlap": Fault(
        attend_prompt,
        "emitter.times(unit, size))",
        "emitter.times(unit, emitter.build.sub(size, one)))",
        LONG_PROMPTS,
    ),
    "dimensions behind the last whole vector are dropped": Fault(
        prompt_tiles, "for piece in pieces(dims - whole, step):", "for piece in pieces(0, step):", LONG_PROMPTS
    ),
    "keys are packed in another order": Fault(prompt_tiles, "for i in (0, 2)]", "for i in (2, 0)]", LONG_PROMPTS),
    "queries in latent space have no position": Fault(
        latent, "if part == 0:", "if part < 0:", "context", NumbaLatentBackend
    ),
    "a head's values are those of the next row of weights": Fault(
        latent, "row = head * up_head + value * up_row", "row = head * up_head", "context", NumbaLatentBackend
    ),
}


@pytest.fixture
def _fresh_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel with a fault is compiled anew, and nobody else gets it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kernels"))
    kernels = (attend_kernel.attend_kernel, attend_kernel.merge_kernel, attend_prompt.attend_prompt_kernel)
    for each in kernels:
        each.clear()
    yield
    for each in kernels:
        each.clear()


def with_fault(fault: Fault, folder: Path) -> ModuleType:
    """The module, compiled from its source with the fault in it."""
    source = inspect.getsource(fault.module)
    assert source.count(fault.original) == 1
    path = folder / "with_a_fault.py"
    path.write_text(source.replace(fault.original, fault.replacement))
    spec = importlib.util.spec_from_file_location("with_a_fault", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plant(fault: Fault, folder: Path, patch: pytest.MonkeyPatch) -> None:
    module = with_fault(fault, folder)
    if fault.module is attend_kernel:
        patch.setattr(calls, "attend_kernel", module.attend_kernel)
        patch.setattr(calls, "merge_kernel", module.merge_kernel)
    elif fault.module is attend_tiles:
        patch.setattr(attend_kernel, "TileWriter", module.TileWriter)
    elif fault.module is attend_prompt:
        patch.setattr(calls, "attend_prompt_kernel", module.attend_prompt_kernel)
    elif fault.module is prompt_tiles:
        patch.setattr(attend_prompt, "PromptTiles", module.PromptTiles)
    else:
        patch.setattr(calls, "make_absorb", module.make_absorb)
        patch.setattr(calls, "make_project", module.make_project)


def failed(fault: Fault) -> list[str]:
    if fault.check == LONG_CONTEXTS:
        return [fault.check] if not attended(Heads(2, 5, 22), num_threads=7).error() < 3e-6 else []
    if fault.check == LONG_PROMPTS:
        result = attended(Heads(2, 5, 22), contexts=(65, 330), new_tokens=(65, 150), num_threads=1, window=50)
        return [fault.check] if not result.error() < 3e-6 else []
    row = next(row for row in fault.backend.capabilities if torch.float32 in row.dtypes)
    row = replace(row, head_dims=frozenset({22}), group_sizes=frozenset({5}), page_sizes=frozenset({3, 16}))
    [check] = [check for check in CHECKS if check.name == fault.check]
    report = try_row(Subject("numba", fault.backend, row, CPU), Effort.QUICK, None, (check,))
    assert [result.check for result in report.results] == [fault.check]
    return [result.check for result in report.failed]


@pytest.mark.parametrize("fault", {(fault.check, fault.backend): fault for fault in FAULTS.values()}.values())
def test_without_a_fault_the_check_passes(fault: Fault) -> None:
    assert failed(fault) == []


@pytest.mark.usefixtures("_fresh_kernels")
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(FAULTS[name], tmp_path, monkeypatch)
    assert failed(FAULTS[name]) == [FAULTS[name].check]
