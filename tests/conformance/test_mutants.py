"""The kit passes correct backends, and finds each of many broken ones where it is broken.

What a check must catch stands in `mutants.py` and the other files of mutants beside it, one fault a mutant.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from conformance.compressed_mutants import COMPRESSED, COMPRESSED_INDEX, COMPRESSED_MUTANTS
from conformance.index_mutants import INDEX_MUTANTS
from conformance.index_parts import INDEX, make_index_backend
from conformance.latent_mutants import LATENT_MUTANTS, LatentMutant
from conformance.latent_parts_backend import LATENT, make_latent_backend
from conformance.mutant_table import ALL_MUTANTS, AnyMutant
from conformance.mutants import MUTANTS
from conformance.parts_backend import EVERYTHING, make_backend
from conformance.sparse_mutants import SPARSE_MUTANTS
from conformance.state_mutants import STATE_MUTANTS
from conformance.state_parts_backend import CONVOLUTION, RECURRENT, make_state_backend
from sightline.attention.backends.torch.compressed_backend import TorchCompressedBackend
from sightline.attention.backends.torch.compressed_index_backend import TorchCompressedIndexBackend
from sightline.attention.capability import Capability
from sightline.attention.contract import AttentionBackend
from sightline.attention.kinds import SpecKind
from sightline.cache.spec import SCALED_DTYPES
from sightline.core.device import available_bytes, detect_device
from sightline.testing.conformance.checks import CHECKS
from sightline.testing.conformance.checks.pages import large_numbers
from sightline.testing.conformance.kit import Verdict, try_row
from sightline.testing.conformance.rig import Subject
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.trial import Check, Effort
from support.case_marks import seldom

CPU = detect_device("cpu")
FEW = Samples(head_dims=(16, 192), group_sizes=(1, 2, 3, 24), page_sizes=(16, 3, 32))
"""Enough for every fault to show."""
BFLOAT16 = replace(
    EVERYTHING, dtypes=frozenset({torch.bfloat16}), cache_dtypes=SCALED_DTYPES | frozenset({torch.bfloat16})
)
SMALLEST_EFFECTS = (
    "next-token",
    "short-context",
    "full-last-page",
    "tail-taken-for-cached",
    "wide-window",
    "own-scale",
    "capped-sinks",
    "lse-in-base-2",
    "parts-mixed-up",
    "cut-off-in-8-bits",
    "scales-never-applied",
)
"""Mutants whose outputs are nearest to right ones."""
LOANS = ["shared-cache", "lent-in-the-step", "context-alone"]
"""Checks that latent attention excuses: its caches are not shared."""
GRAPHS = ["captured-decode", "captured-replay"]
"""Checks that a CPU excuses."""


_SLOW_MUTANTS: tuple[AnyMutant, ...] = (*STATE_MUTANTS, *SPARSE_MUTANTS, *INDEX_MUTANTS, *COMPRESSED_MUTANTS)
EFFORTS = [
    pytest.param(effort, id=effort.value, marks=(pytest.mark.slow,) if effort is Effort.FULL else ())
    for effort in Effort
]


def on_cpu() -> list[AnyMutant]:
    return [mutant for mutant in ALL_MUTANTS if not mutant.cuda_only]


def is_caught(mutant: AnyMutant, subject: Subject) -> bool:
    """Whether its own check fails."""
    [check] = (check for check in CHECKS if check.name == mutant.caught_by)
    return bool(try_row(subject, Effort.QUICK, FEW, [check]).failed)


def checks_of_parts(effort: Effort) -> list[Check]:
    """Naive parts are slow: with quick effort, `covering` is left to the built-in backends, which pass it."""
    return [check for check in CHECKS if check.name != "covering" or effort is Effort.FULL]


def some_with_the_whole_kit() -> list[ParameterSet]:
    """The whole kit takes up to a minute: a few mutants get it in `make prove`, the others where tests may be slow."""
    return [
        pytest.param(mutant, id=mutant.name, marks=() if index % 60 == 0 else (pytest.mark.slow,))
        for index, mutant in enumerate(on_cpu())
        if mutant not in _SLOW_MUTANTS
    ] + [pytest.param(mutant, id=mutant.name, marks=(pytest.mark.slow,)) for mutant in _SLOW_MUTANTS]


@pytest.mark.parametrize("effort", EFFORTS)
def test_the_correct_parts_pass_every_check(effort: Effort) -> None:
    report = try_row(Subject("parts", make_backend(), EVERYTHING, CPU), effort, None, checks_of_parts(effort))
    assert {result.check: result.detail for result in report.failed} == {}
    excused = [result.check for result in report.results if result.verdict is Verdict.EXCUSED]
    assert excused == GRAPHS


@pytest.mark.parametrize("effort", EFFORTS)
def test_the_correct_latent_parts_pass_every_check(effort: Effort) -> None:
    report = try_row(Subject("latent parts", make_latent_backend(), LATENT, CPU), effort, None, checks_of_parts(effort))
    assert {result.check: result.detail for result in report.failed} == {}
    excused = [result.check for result in report.results if result.verdict is Verdict.EXCUSED]
    assert excused == [
        "shared-cache",
        "lent-in-the-step",
        "context-alone",
        "window",
        "host-bounds",
        "softcap",
        "sinks",
        "batch-invariance",
        *GRAPHS,
    ]


@pytest.mark.parametrize("effort", EFFORTS)
def test_the_correct_parts_of_indexers_pass_every_check(effort: Effort) -> None:
    report = try_row(Subject("index parts", make_index_backend(), INDEX, CPU), effort, FEW, checks_of_parts(effort))
    assert {result.check: result.detail for result in report.failed} == {}
    excused = [result.check for result in report.results if result.verdict is Verdict.EXCUSED]
    assert excused == ["host-bounds", "batch-invariance", *GRAPHS]


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("row", [RECURRENT, CONVOLUTION], ids=["recurrent", "convolution"])
def test_the_correct_parts_of_layers_with_states_pass_every_check(row: Capability, effort: Effort) -> None:
    report = try_row(
        Subject("state parts", make_state_backend(declares=row), row, CPU), effort, FEW, checks_of_parts(effort)
    )
    assert {result.check: result.detail for result in report.failed} == {}
    assert [result.check for result in report.results if result.verdict is Verdict.EXCUSED] == GRAPHS


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("row", [COMPRESSED, COMPRESSED_INDEX], ids=["compressed", "compressed index"])
def test_compressed_attention_in_several_dtypes_passes_every_check(row: Capability, effort: Effort) -> None:
    backends: dict[SpecKind, type[AttentionBackend[Any, Any]]] = {
        SpecKind.COMPRESSED: TorchCompressedBackend,
        SpecKind.COMPRESSED_INDEX: TorchCompressedIndexBackend,
    }
    [kind] = row.spec_kinds
    subject = Subject("torch", backends[kind], row, CPU)
    report = try_row(subject, effort, FEW, checks_of_parts(effort))
    assert {result.check: result.detail for result in report.failed} == {}
    excused = [result.check for result in report.results if result.verdict is Verdict.EXCUSED]
    assert excused == ["batch-invariance", *GRAPHS]


NARROW_FAULTS = (
    "key-scale-not-read",
    "scale-not-written",
    "scales-never-applied",
    "first-layers-scale",
    "no-saturation",
)


def of_8_bits_alone() -> list[Subject]:
    softmax, latent = (replace(row, cache_dtypes=SCALED_DTYPES) for row in (EVERYTHING, LATENT))
    return [
        Subject("parts", make_backend(declares=softmax), softmax, CPU),
        Subject("latent parts", make_latent_backend(declares=latent), latent, CPU),
    ]


@pytest.mark.parametrize(
    "subject",
    [
        pytest.param(subject, id=subject.name, marks=() if subject.name == "latent parts" else pytest.mark.slow)
        for subject in of_8_bits_alone()
    ],
)
def test_rows_that_declare_no_cache_but_of_8_bits_are_tried_with_it(subject: Subject) -> None:
    report = try_row(subject, Effort.QUICK, FEW, checks_of_parts(Effort.QUICK))
    assert {result.check: result.detail for result in report.failed} == {}


@pytest.mark.parametrize("name", seldom(NARROW_FAULTS, "key-scale-not-read"))
def test_faults_of_scales_are_found_where_they_are_in_rows_of_8_bits_alone(name: str) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    row = replace(EVERYTHING, cache_dtypes=SCALED_DTYPES)
    report = try_row(mutant.subject(CPU, row), Effort.QUICK, FEW)
    assert [result.check for result in report.failed] == [mutant.caught_by], mutant.fault


@pytest.mark.parametrize("mutant", on_cpu(), ids=lambda mutant: mutant.name)
def test_a_mutant_fails_its_check(mutant: AnyMutant) -> None:
    assert is_caught(mutant, mutant.subject(CPU)), mutant.fault


@pytest.mark.parametrize("mutant", some_with_the_whole_kit())
def test_a_mutant_fails_its_check_and_no_other(mutant: AnyMutant) -> None:
    report = try_row(mutant.subject(CPU), Effort.QUICK, FEW)
    assert [result.check for result in report.failed] == [mutant.caught_by], mutant.fault


@pytest.mark.parametrize("name", SMALLEST_EFFECTS)
def test_the_looser_tolerance_of_bfloat16_hides_no_fault(name: str) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    assert is_caught(mutant, mutant.subject(CPU, BFLOAT16)), mutant.fault


@pytest.mark.parametrize("mutant", LATENT_MUTANTS, ids=lambda mutant: mutant.name)
def test_the_looser_tolerance_of_bfloat16_hides_no_fault_of_latent_attention(mutant: LatentMutant) -> None:
    row = replace(LATENT, dtypes=BFLOAT16.dtypes, cache_dtypes=BFLOAT16.cache_dtypes)
    assert is_caught(mutant, mutant.subject(CPU, row)), mutant.fault


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("effort", list(Effort), ids=lambda effort: effort.value)
def test_the_correct_parts_pass_every_check_on_a_gpu(effort: Effort) -> None:
    report = try_row(Subject("parts", make_backend(), EVERYTHING, detect_device("cuda")), effort)
    assert {result.check: result.detail for result in report.failed} == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("effort", list(Effort), ids=lambda effort: effort.value)
def test_the_correct_latent_parts_pass_every_check_on_a_gpu(effort: Effort) -> None:
    report = try_row(Subject("latent parts", make_latent_backend(), LATENT, detect_device("cuda")), effort)
    assert {result.check: result.detail for result in report.failed} == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("mutant", ALL_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fails_its_check_and_no_other_on_a_gpu(mutant: AnyMutant) -> None:
    device = detect_device("cuda")
    is_of_size = mutant.cuda_only and mutant.caught_by == "large-pool"
    if is_of_size and large_numbers(device, torch.float16.itemsize, available_bytes(device)) < 1 << 32:
        pytest.skip("needs a card with room for a pool of 2^32 numbers")
    report = try_row(mutant.subject(device), Effort.QUICK, FEW)
    assert [result.check for result in report.failed] == [mutant.caught_by], mutant.fault


def test_every_check_has_a_mutant_of_its_own() -> None:
    assert {mutant.caught_by for mutant in ALL_MUTANTS} == {check.name for check in CHECKS}


def test_mutants_have_names_of_their_own() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in ALL_MUTANTS).items() if count > 1] == []
