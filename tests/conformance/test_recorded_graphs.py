"""The checks of captured graphs, where graphs are recorded: they pass what is right, and each fault fails its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conformance.latent_mutants import LatentMutant
from conformance.mutant_table import ALL_MUTANTS
from conformance.mutants import Mutant
from conformance.parts import CORRECT
from conformance.parts_backend import EVERYTHING, make_backend
from conformance.test_mutants import FEW, GRAPHS
from sightline.attention.backends.triton.compressed_backend import TritonCompressedBackend
from sightline.attention.backends.triton.index_backend import TritonIndexBackend
from sightline.attention.backends.triton.rows import COMPRESSED_ROWS, INDEX_ROWS
from sightline.attention.contract import BackendContext
from sightline.attention.spec import SoftmaxSpec
from sightline.testing.conformance.checks import CHECKS
from sightline.testing.conformance.kit import Verdict, try_row
from sightline.testing.conformance.rig import Subject
from sightline.testing.conformance.trial import Effort
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


def test_a_correct_backend_passes() -> None:
    right = make_backend(replace(CORRECT, longest=enough_for_any))
    report = try_row(Subject("parts", right, EVERYTHING, RECORDING), Effort.QUICK, FEW, CAPTURED)
    assert {result.check: result.verdict for result in report.results} == dict.fromkeys(GRAPHS, Verdict.PASSED)


def test_a_captured_indexer_passes_also_if_it_is_replayed_without_rows() -> None:
    subject = Subject("triton-index", TritonIndexBackend, INDEX_ROWS[-1], RECORDING)
    report = try_row(subject, Effort.QUICK, FEW, CAPTURED)
    assert {result.check: result.verdict for result in report.results} == dict.fromkeys(GRAPHS, Verdict.PASSED)


@pytest.mark.prove
def test_captured_layers_with_windows_and_entries_pass_whether_they_choose_or_not() -> None:
    subject = Subject("triton-compressed", TritonCompressedBackend, COMPRESSED_ROWS[-1], RECORDING)
    report = try_row(subject, Effort.QUICK, FEW, [each for each in CAPTURED if each.name == "captured-decode"])
    assert [result.verdict for result in report.results] == [Verdict.PASSED], report.failed


ONLY_IN_GRAPHS = [mutant for mutant in ALL_MUTANTS if mutant.cuda_only and mutant.caught_by in GRAPHS]


@pytest.mark.parametrize("mutant", ONLY_IN_GRAPHS, ids=lambda each: each.name)
def test_a_fault_that_only_graphs_show_fails_its_check_and_no_other(mutant: Mutant | LatentMutant) -> None:
    report = try_row(on_recording(mutant), Effort.QUICK, FEW, CAPTURED)
    assert [result.check for result in report.failed] == [mutant.caught_by], mutant.fault


@pytest.mark.parametrize(
    "waits",
    [
        lambda given: given.sum().item(),
        lambda given: given.nonzero(),
        lambda given: given[given > 0],
        lambda given: given.masked_select(given > 0),
        lambda given: given.unique(),
        lambda given: torch.equal(given, given),
    ],
    ids=["item", "nonzero", "mask", "masked-select", "unique", "equal"],
)
def test_what_the_host_must_wait_for_cannot_be_captured(waits: Callable[[Tensor], object]) -> None:
    given = torch.ones(3)
    with pytest.raises(RuntimeError, match="wait for nothing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        waits(given)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ALL_MUTANTS, ids=lambda each: each.name)
def test_a_mutant_fails_its_check_and_no_other(mutant: Mutant | LatentMutant) -> None:
    report = try_row(on_recording(mutant), Effort.QUICK, FEW)
    assert [result.check for result in report.failed] == [mutant.caught_by], mutant.fault
