"""The checks of captured graphs, where graphs are recorded: they pass what is right, and each fault fails its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conformance.latent_mutants import LatentMutant
from conformance.latent_parts_backend import LATENT, make_latent_backend
from conformance.mutant_table import ALL_MUTANTS
from conformance.mutants import Mutant
from conformance.parts import CORRECT
from conformance.parts_backend import EVERYTHING, make_backend
from conformance.test_mutants import FEW, GRAPHS
from sightline.attention.contract import BackendContext
from sightline.attention.spec import SoftmaxSpec
from sightline.testing.bench import Subject
from sightline.testing.checks import CHECKS
from sightline.testing.kit import try_row
from sightline.testing.trial import Effort
from support import recorded_graphs
from support.recorded_graphs import RECORDING

CAPTURED = [check for check in CHECKS if check.name in GRAPHS]


@pytest.fixture(autouse=True)
def _recording(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_graphs.install(monkeypatch)


def enough_for_any(context: BackendContext[SoftmaxSpec], bounds: object, new: object) -> int:
    """As the correct parts split on a GPU."""
    return context.limits.max_seq_len


def on_recording(mutant: Mutant | LatentMutant) -> Subject:
    match mutant:
        case Mutant(parts=parts) if parts.longest is CORRECT.longest:
            return replace(mutant, parts=replace(parts, longest=enough_for_any)).subject(RECORDING)
        case _:
            return mutant.subject(RECORDING)


def test_correct_backends_pass() -> None:
    right = make_backend(replace(CORRECT, longest=enough_for_any))
    assert try_row(Subject("parts", right, EVERYTHING, RECORDING), Effort.QUICK, FEW, CAPTURED).failed == ()
    latent = Subject("latent parts", make_latent_backend(), LATENT, RECORDING)
    assert try_row(latent, Effort.QUICK, FEW, CAPTURED).failed == ()


@pytest.mark.parametrize("mutant", [mutant for mutant in ALL_MUTANTS if mutant.cuda_only], ids=lambda each: each.name)
def test_a_fault_that_only_graphs_show_fails_its_check_and_no_other(mutant: Mutant | LatentMutant) -> None:
    report = try_row(on_recording(mutant), Effort.QUICK, FEW, CAPTURED)
    assert [result.check for result in report.failed] == [mutant.caught_by], mutant.fault


def test_what_the_host_must_wait_for_cannot_be_captured() -> None:
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="wait for nothing"), torch.cuda.graph(graph):
        torch.ones(1).item()


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(each, id=each.name, marks=() if each.name == "bounds-for-lengths" else (pytest.mark.slow,))
        for each in ALL_MUTANTS
    ],
)
def test_a_mutant_fails_its_check_and_no_other(mutant: Mutant | LatentMutant) -> None:
    report = try_row(on_recording(mutant), Effort.QUICK, FEW)
    assert [result.check for result in report.failed] == [mutant.caught_by], mutant.fault
