"""A conformance run tells what came of every row: tried, skipped or broken; and proves only what it fully tried."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import sightline.testing
from sightline.attention.backends.reference.backend import ReferenceBackend
from sightline.attention.capability import ANY, Capability
from sightline.attention.declared_rows import Unloadable, row_labels
from sightline.attention.dimensions import Dimension, Value
from sightline.attention.kinds import SpecKind
from sightline.attention.oracle.dtypes import cache_dtypes, compute_dtypes
from sightline.attention.proof import Proof, ProofBook, dtype_name
from sightline.attention.selection import Candidate
from sightline.core.device import Device, DeviceKind, detect_device
from sightline.core.errors import ConfigError
from sightline.testing.conformance.kit import Verdict
from sightline.testing.conformance.report import ConformanceReport, TriedRow, run_conformance
from sightline.testing.conformance.rows import RowToTry, SkippedRow, Watch, list_rows
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.trial import Check, Effort, Trial, fail
from support.coverages import points_of
from support.crew_checks import SINGLE as ROW

CPU = detect_device("cpu")
SM120 = Device(DeviceKind.CUDA, torch.device("cuda", 0), "card", (12, 0))


def candidate(name: str, *rows: Capability) -> Candidate:
    class Stub(ReferenceBackend):
        capabilities: ClassVar[tuple[Capability, ...]] = rows

    return Candidate.of(name, Stub, "a-package", by_default=False)


def passes(trial: Trial) -> None:
    trial.progress.num_steps += 1
    samples, row = trial.samples, trial.row
    trial.progress.points += points_of(
        samples.of_head_dims(row),
        samples.of_group_sizes(row),
        samples.of_page_sizes(row),
        [dtype_name(dtype) for dtype in compute_dtypes(row)],
        [dtype_name(dtype) for dtype in cache_dtypes(row)],
    )


def covered(proof: Proof, dimension: Dimension) -> set[Value]:
    return set(proof.coverage.values[dimension])


def fails(trial: Trial) -> None:
    fail("expected light, got darkness")


PASSING = (
    Check("ground", "there is ground", passes),
    Check("sky", "there is a sky", passes, ("ground",), excused=lambda subject: "no sky is declared"),
)
FAILING = (Check("ground", "there is ground", fails), Check("house", "a house stands", passes, ("ground",)))
MINE = candidate("mine", ROW)


@pytest.fixture
def book(tmp_path: Path) -> ProofBook:
    return ProofBook(tmp_path / "proofs")


def run(
    book: ProofBook,
    *candidates: Candidate,
    checks: tuple[Check, ...] = PASSING,
    effort: Effort = Effort.FULL,
    samples: Samples | None = None,
) -> ConformanceReport:
    return run_conformance(
        device="cpu", book=book, candidates=candidates or (MINE,), checks=checks, effort=effort, samples=samples
    )


def only(report: ConformanceReport) -> TriedRow:
    (outcome,) = report.outcomes
    assert isinstance(outcome, TriedRow)
    return outcome


def test_a_full_pass_is_a_proof_of_what_was_tried(book: ProofBook) -> None:
    report = run(book)
    assert not report.failed
    found = book.find(MINE, ROW, CPU)
    assert found == only(report).proof
    assert found is not None
    assert found.checks == ("ground",), "what is excused is not proven"
    assert covered(found, Dimension.PAGE_SIZE) == set(Samples().page_sizes)
    assert covered(found, Dimension.DTYPE) == covered(found, Dimension.CACHE_DTYPE) == {"float32"}


def test_only_listed_values_and_known_dtypes_are_covered(book: ProofBook) -> None:
    row = replace(
        ROW,
        page_sizes=frozenset({32, 8}),
        dtypes=frozenset({torch.float16, torch.float64}),
        cache_dtypes=ANY,
    )
    proof = only(run(book, candidate("mine", row))).proof
    assert proof is not None
    assert covered(proof, Dimension.PAGE_SIZE) == {8, 32}
    assert covered(proof, Dimension.DTYPE) == {"float16"}
    assert covered(proof, Dimension.CACHE_DTYPE) == {"float32", "bfloat16", "float16", "float8_e4m3fn"}


def test_a_quick_pass_proves_nothing_and_leaves_the_book_as_it_is(book: ProofBook) -> None:
    assert only(run(book, effort=Effort.QUICK)).proof is None
    assert not book.folder.exists()
    run(book)
    assert not only(run(book, checks=FAILING, effort=Effort.QUICK)).voided
    assert book.find(MINE, ROW, CPU) is not None


def test_a_full_failure_voids_the_proof_that_there_was(book: ProofBook) -> None:
    run(book)
    report = run(book, checks=FAILING)
    assert report.failed
    assert only(report).voided
    assert only(report).proof is None
    assert book.find(MINE, ROW, CPU) is None
    assert not only(run(book, checks=FAILING)).voided


def test_a_row_that_fails_voids_no_other(book: ProofBook) -> None:
    other = replace(ROW, dtypes=frozenset({torch.float16}))
    both = candidate("mine", ROW, other)
    run(book, both)

    def fails_in_half(trial: Trial) -> None:
        if trial.dtype is torch.float16:
            fail("expected more, got half")

    report = run(book, both, checks=(Check("ground", "there is ground", fails_in_half),))
    assert report.failed
    assert book.find(both, ROW, CPU) is not None
    assert book.find(both, other, CPU) is None


def test_a_run_that_excused_everything_proves_nothing(book: ProofBook) -> None:
    report = run(book, checks=PASSING[1:])
    assert not report.failed
    assert only(report).proof is None


def test_a_blocked_check_names_its_ground(book: ProofBook) -> None:
    row = only(run(book, checks=FAILING))
    assert [result.check for result in row.report.of(Verdict.FAILED)] == ["ground"]
    assert [result.detail for result in row.report.of(Verdict.BLOCKED)] == ["builds on ground"]


def test_an_error_of_the_backend_is_a_failure_of_the_check(book: ProofBook) -> None:
    def raises(trial: Trial) -> None:
        raise RuntimeError("out of luck")

    report = run(book, checks=(Check("ground", "there is ground", raises),))
    assert report.failed
    assert "RuntimeError: out of luck" in only(report).report.of(Verdict.FAILED)[0].detail


SKIPPED = {
    "package": (replace(ROW, package="no_such_package"), CPU, "package no_such_package is not installed"),
    "device": (ROW, SM120, "runs on cpu, not cuda"),
    "compute capability": (
        replace(ROW, devices=frozenset(DeviceKind), compute_capabilities=frozenset({(9, 0), (10, 0)})),
        SM120,
        "does not list compute capability (12, 0)",
    ),
    "dtypes": (replace(ROW, dtypes=frozenset({torch.float64})), CPU, "the kit has no oracle for its dtypes"),
    "cache dtypes": (
        replace(ROW, cache_dtypes=frozenset({torch.float8_e5m2})),
        CPU,
        "the kit has no oracle for its dtypes",
    ),
}


@pytest.mark.parametrize(("row", "device", "reason"), SKIPPED.values(), ids=SKIPPED.keys())
def test_a_row_that_cannot_be_tried_is_skipped_with_the_reason(row: Capability, device: Device, reason: str) -> None:
    (skipped,) = list_rows([candidate("mine", row)], device)
    assert isinstance(skipped, SkippedRow)
    assert skipped.reasons == (reason,)


def test_a_listed_compute_capability_and_listed_numbers_are_tried() -> None:
    row = replace(
        ROW,
        devices=frozenset(DeviceKind),
        compute_capabilities=frozenset({(12, 0)}),
        head_dims=frozenset({72}),
        group_sizes=frozenset({9}),
        page_sizes=frozenset({40}),
    )
    (listed,) = list_rows([candidate("mine", row)], SM120)
    assert isinstance(listed, RowToTry)


def test_a_skip_is_neither_a_failure_nor_a_proof(book: ProofBook) -> None:
    row = replace(ROW, package="no_such_package")
    skipping = candidate("mine", row)
    assert not run(book, skipping).failed
    assert book.find(skipping, row, CPU) is None


def test_a_backend_without_rows_is_not_passed_over_in_silence(book: ProofBook) -> None:
    (outcome,) = run(book, candidate("empty")).outcomes
    assert isinstance(outcome, SkippedRow)
    assert outcome.reasons == ("declares no capability",)


def test_a_backend_that_cannot_be_imported_fails_alone(book: ProofBook) -> None:
    def load() -> type[ReferenceBackend]:
        raise ConfigError("no kernel")

    report = run(book, Candidate("broken", False, "a-package", load, lambda: load().capabilities), MINE)
    broken, tried = report.outcomes
    assert broken == Unloadable("broken", "no kernel")
    assert isinstance(tried, TriedRow)
    assert tried.report.passed
    assert report.failed


def test_backends_are_chosen_by_name_each_once(book: ProofBook) -> None:
    there = (MINE, candidate("yours", ROW), candidate("theirs", ROW))
    report = run_conformance(["theirs", "mine", "theirs"], device="cpu", book=book, candidates=there, checks=PASSING)
    assert [outcome.backend for outcome in report.outcomes] == ["theirs", "mine"]


def test_an_unknown_backend_is_refused_with_the_names_that_there_are(book: ProofBook) -> None:
    with pytest.raises(ConfigError, match="expected an attention backend out of mine, got 'flash'"):
        run_conformance(["flash"], device="cpu", book=book, candidates=[MINE], checks=PASSING)


def test_a_book_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tried: list[Trial] = []
    checks = (Check("ground", "there is ground", tried.append),)
    with pytest.raises(ConfigError, match="expected a folder for proofs that can be written"):
        run(ProofBook(tmp_path / "file" / "proofs"), checks=checks)
    assert tried == []


def test_more_samples_come_after_the_usual_ones_and_are_proven(book: ProofBook) -> None:
    samples = Samples().and_more([40], [11], [48, 16])
    usual = Samples()
    assert samples == Samples((*usual.head_dims, 40), (*usual.group_sizes, 11), (*usual.page_sizes, 48))
    proof = only(run(book, samples=samples)).proof
    assert proof is not None
    geometry = (Dimension.HEAD_DIM, Dimension.GROUP_SIZE, Dimension.PAGE_SIZE)
    assert all(value in covered(proof, dimension) for dimension, value in zip(geometry, (40, 11, 48), strict=True))


def test_what_was_proven_before_stays_proven_beside_what_is_new(book: ProofBook) -> None:
    run(book, samples=Samples().and_more((), (), [48]))
    proof = only(run(book, samples=Samples().and_more((), (), [56]))).proof
    assert proof is not None
    assert {48, 56} <= covered(proof, Dimension.PAGE_SIZE)
    assert (48, 64) in {(b, a) for a, b in proof.coverage.met[Dimension.HEAD_DIM, Dimension.PAGE_SIZE]}


def test_what_failed_since_is_not_joined(book: ProofBook) -> None:
    run(book, samples=Samples().and_more((), (), [48]))
    run(book, checks=FAILING)
    proof = only(run(book)).proof
    assert proof is not None
    assert 48 not in covered(proof, Dimension.PAGE_SIZE)


def test_a_part_of_the_checks_proves_nothing(book: ProofBook) -> None:
    report = run_conformance(only=["ground"], checks=PASSING, book=book, candidates=[MINE])
    assert not report.is_whole
    assert [result.check for result in only(report).report.results] == ["ground"]
    assert only(report).proof is None
    with pytest.raises(ConfigError, match=r"expected checks out of .*ground.*, got nonsense"):
        run_conformance(only=["nonsense"], checks=PASSING, book=book, candidates=[MINE])


def test_a_sample_that_the_row_does_not_list_is_told_and_not_proven(book: ProofBook) -> None:
    row = replace(ROW, page_sizes=frozenset({16}))
    tried = only(run(book, candidate("mine", row), samples=Samples().and_more((), (), [48])))
    assert tried.not_listed == ("page size 48",)
    assert tried.proof is not None
    assert covered(tried.proof, Dimension.PAGE_SIZE) == {16}


def test_a_row_of_two_kinds_is_tried_once_for_each_and_proven_by_both(book: ProofBook) -> None:
    row = replace(ROW, spec_kinds=frozenset({SpecKind.SOFTMAX, SpecKind.LATENT}))
    both = candidate("both", row)
    seen: list[SpecKind] = []

    def look(trial: Trial) -> None:
        seen.append(trial.subject.kind)
        trial.progress.points.append({Dimension.KIND: trial.subject.kind.value})

    checks = (
        Check("ground", "there is ground", look),
        Check("depth", "it is deep", passes, kinds=frozenset({SpecKind.LATENT})),
    )
    softmax, latent = run(book, both, checks=checks).outcomes
    assert isinstance(softmax, TriedRow)
    assert isinstance(latent, TriedRow)
    assert seen == [SpecKind.SOFTMAX, SpecKind.LATENT]
    assert (softmax.label, latent.label) == ("float32 softmax", "float32 latent")
    assert [result.check for result in softmax.report.results] == ["ground"]
    assert softmax.proof is None, "there is more of the row to try"
    assert latent.proof is not None
    assert latent.proof.checks == ("ground", "depth")
    assert book.find(both, row, CPU) == latent.proof
    assert covered(latent.proof, Dimension.KIND) == {"softmax", "latent"}


@pytest.mark.parametrize("broken", SpecKind, ids=lambda kind: kind.value)
def test_a_row_of_two_kinds_is_not_proven_where_one_fails(book: ProofBook, broken: SpecKind) -> None:
    row = replace(ROW, spec_kinds=frozenset(SpecKind))
    both = candidate("both", row)
    run(book, both)
    assert book.find(both, row, CPU) is not None
    report = run(book, both, checks=(PASSING[0], Check("depth", "it is deep", fails, kinds=frozenset({broken}))))
    assert report.failed
    assert book.find(both, row, CPU) is None


def test_a_latent_row_is_tried_at_the_entries_of_its_models_too(book: ProofBook) -> None:
    row = replace(ROW, spec_kinds=frozenset({SpecKind.LATENT}))
    proof = only(run(book, candidate("mine", row))).proof
    assert proof is not None
    assert covered(proof, Dimension.HEAD_DIM) == {*Samples().head_dims, 576}
    listed = replace(row, head_dims=frozenset({320}))
    assert only(run(book, candidate("mine", listed))).not_listed == (), "nobody asked for 576"


def test_a_row_of_no_kind_is_skipped() -> None:
    (skipped,) = list_rows([candidate("mine", replace(ROW, spec_kinds=frozenset()))], CPU)
    assert isinstance(skipped, SkippedRow)
    assert skipped.reasons == ("declares no kind of attention",)


def test_rows_have_labels_of_their_own() -> None:
    half = replace(ROW, dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}))
    assert row_labels([ROW, half, ROW]) == ("float32#1", "float32+bfloat16+float16", "float32#2")


def test_whoever_watches_is_told_as_it_comes(book: ProofBook) -> None:
    said: list[str] = []
    run_conformance(
        device="cpu",
        book=book,
        candidates=[MINE],
        checks=PASSING,
        watch=Watch(
            lambda row: said.append(row.label),
            lambda row, result: said.append(f"{row.label} {result.check} {result.verdict.value}"),
        ),
    )
    assert said == ["float32", "float32 ground passed", "float32 sky excused"]


def test_a_report_is_json(book: ProofBook) -> None:
    skipping = candidate("skipping", replace(ROW, package="no_such_package"))
    data = json.loads(json.dumps(run(book, MINE, skipping, checks=FAILING).to_data()))
    assert data["failed"] is True
    assert (data["device"]["kind"], data["effort"]) == ("cpu", "full")
    failed, skipped = data["rows"]
    assert (failed["status"], skipped["status"]) == ("failed", "skipped")
    assert failed["checks"][0] | {"seconds": 0} == {
        "check": "ground",
        "verdict": "failed",
        "detail": "expected light, got darkness",
        "case": "",
        "trace": "",
        "num_steps": 0,
        "seconds": 0,
        "proves": "there is ground",
    }
    assert failed["proof"] is None
    assert skipped["reasons"] == ["package no_such_package is not installed"]


def test_every_export_is_there_and_an_unknown_one_is_not() -> None:
    for name in sightline.testing.__all__:
        assert getattr(sightline.testing, name) is not None
    assert set(dir(sightline.testing)) == set(sightline.testing.__all__)
    assert not hasattr(sightline.testing, "no_such_name")
