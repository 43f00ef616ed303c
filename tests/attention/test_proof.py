"""A proof is of one row, one device, one set of versions and sources; of anything else there is none."""

from __future__ import annotations

import inspect
import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from sightline.attention import proof as proof_module
from sightline.attention.backends.reference.backend import ReferenceBackend
from sightline.attention.capability import ANY, Capability, GraphLevel, HostLengths, Requirement
from sightline.attention.coverage import Coverage, Demand
from sightline.attention.dimensions import Dimension, Span
from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.proof import Proof, ProofBook, declared, utc_now
from sightline.attention.selection import Candidate
from sightline.attention.spec import SoftmaxSpec
from sightline.core.device import Device, DeviceKind
from sightline.core.errors import ConfigError
from support.coverages import coverage_of, points_of

CPU = Device(DeviceKind.CPU, torch.device("cpu"), "cpu", None)
CARD = Device(DeviceKind.CUDA, torch.device("cuda", 0), "card", (9, 0))
ROW = Capability(
    spec_kinds=frozenset({SpecKind.SOFTMAX}),
    devices=frozenset(DeviceKind),
    compute_capabilities=ANY,
    dtypes=frozenset({torch.float32}),
    cache_dtypes=ANY,
    head_dims=ANY,
    group_sizes=ANY,
    page_sizes=ANY,
    features=frozenset({Feature.WINDOW}),
    host_lengths=HostLengths.EXACT,
)
COVERAGE = Coverage.of(
    {**point, Dimension.ROWS: rows, Dimension.CONTEXT: rows}
    for point in points_of((64, 128), (1, 2), (16, 1))
    for rows in (1, 8)
)
NEED = Requirement(SoftmaxSpec(4, 2, 64, 0.125), CPU, torch.float32, torch.float32, page_size=16)


class Mine(ReferenceBackend):
    capabilities: ClassVar[tuple[Capability, ...]] = (ROW,)


MINE = Candidate.of("mine", Mine, "a-package", by_default=False)


@pytest.fixture
def book(tmp_path: Path) -> ProofBook:
    return ProofBook(tmp_path / "cache" / "proofs")


def prove(book: ProofBook, device: Device = CPU, coverage: Coverage = COVERAGE) -> Path:
    return book.record(Proof(book.identify(MINE, ROW, device), coverage, ("causal", "window"), utc_now()))


def test_what_is_recorded_is_found_as_it_was(book: ProofBook) -> None:
    proof = Proof(book.identify(MINE, ROW, CARD), COVERAGE, ("causal", "window"), utc_now())
    book.record(proof)
    assert book.find(MINE, ROW, CARD) == proof
    assert ProofBook(book.folder).find(MINE, ROW, CARD) == proof
    assert book.distrusted() == ()


def test_without_a_record_there_is_no_proof_and_nothing_is_written(book: ProofBook) -> None:
    assert book.find(MINE, ROW, CPU) is None
    assert book.distrusted() == ()
    assert not book.folder.exists()


DELTA_RULE = frozenset({Feature.DELTA_RULE})
OTHER_ROWS: dict[str, Capability] = {
    "spec_kinds": replace(ROW, spec_kinds=frozenset()),
    "devices": replace(ROW, devices=frozenset({DeviceKind.CPU})),
    "compute_capabilities": replace(ROW, compute_capabilities=frozenset({(9, 0)})),
    "dtypes": replace(ROW, dtypes=frozenset({torch.float32, torch.float16})),
    "cache_dtypes": replace(ROW, cache_dtypes=frozenset({torch.float32})),
    "head_dims": replace(ROW, head_dims=frozenset({64})),
    "group_sizes": replace(ROW, group_sizes=frozenset({1})),
    "page_sizes": replace(ROW, page_sizes=frozenset({16})),
    "features": replace(ROW, features=frozenset()),
    "host_lengths": replace(ROW, host_lengths=HostLengths.BOUND),
    "graph": replace(ROW, graph=GraphLevel.FULL),
    "package": replace(ROW, package="torch"),
    "expanded_dims": replace(ROW, expanded_dims=frozenset({(192, 128)})),
    "only_with": replace(ROW, features=ROW.features | DELTA_RULE, only_with=DELTA_RULE),
}


def test_every_column_is_part_of_what_is_proven() -> None:
    assert OTHER_ROWS.keys() == declared(ROW).keys()


@pytest.mark.parametrize("row", OTHER_ROWS.values(), ids=OTHER_ROWS.keys())
def test_a_row_that_declares_anything_else_is_not_proven(book: ProofBook, row: Capability) -> None:
    prove(book)
    assert book.find(MINE, row, CPU) is None


@pytest.mark.parametrize(
    ("proven", "asked"),
    [
        (CPU, CARD),
        (CARD, replace(CARD, name="another card")),
        (CARD, replace(CARD, compute_capability=(9, 1))),
    ],
)
def test_another_device_is_not_proven(book: ProofBook, proven: Device, asked: Device) -> None:
    prove(book, proven)
    assert book.find(MINE, ROW, proven) is not None
    assert book.find(MINE, ROW, asked) is None


@pytest.mark.parametrize("changes", [{"name": "yours"}, {"distribution": "another-package"}])
def test_another_backend_is_not_proven(book: ProofBook, changes: dict[str, str]) -> None:
    prove(book)
    assert book.find(replace(MINE, **changes), ROW, CPU) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("upgraded", ["torch", "triton", "numpy", "a-package", "behind-the-row"])
def test_other_versions_are_not_proven(book: ProofBook, monkeypatch: pytest.MonkeyPatch, upgraded: str) -> None:
    row = replace(ROW, package="rows_module.inner")
    versions = dict.fromkeys(["torch", "triton", "numpy", "a-package", "behind-the-row"], "1.0")
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    monkeypatch.setattr(proof_module, "_distributions", {"rows_module": {"behind-the-row"}}.__getitem__)
    book.record(Proof(book.identify(MINE, row, CPU), COVERAGE, ("causal",), utc_now()))
    assert book.find(MINE, row, CPU) is not None
    versions[upgraded] = "1.1"
    assert book.find(MINE, row, CPU) is None


def test_versions_name_what_is_there_and_nothing_that_is_not(book: ProofBook) -> None:
    versions = dict(book.identify(MINE, replace(ROW, package="torch.nn"), CPU).versions)
    assert versions["torch"] == torch.__version__
    assert versions.keys() - {"triton"} == {"numpy", "python", "sightline", "torch"}


@pytest.mark.parametrize("constant", ["__version__", "_PROVEN_SOURCES"])
def test_another_sightline_is_not_proven(book: ProofBook, monkeypatch: pytest.MonkeyPatch, constant: str) -> None:
    prove(book)
    monkeypatch.setattr(proof_module, constant, ("attention",) if constant == "_PROVEN_SOURCES" else "99.0")
    assert book.find(MINE, ROW, CPU) is None


@pytest.mark.parametrize(
    ("module", "home", "edited", "stays"),
    [
        ("edited_package.backend", "backend.py", "backend.py", False),
        ("edited_package.backend", "backend.py", "inner/kernels.py", False),
        ("edited_package", "__init__.py", "inner/kernels.py", False),
        ("edited_package.inner", "inner/__init__.py", "backend.py", False),
        ("backend", "backend.py", "backend.py", False),
        ("backend", "backend.py", "inner/kernels.py", True),
    ],
)
def test_an_edit_of_the_backends_own_package_voids_its_proof(
    book: ProofBook, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, home: str, edited: str, stays: bool
) -> None:
    package = tmp_path / "edited_package"
    for name in ("__init__.py", "backend.py", "inner/__init__.py", "inner/kernels.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("# as it was\n")
    moved = type("Moved", (Mine,), {"__module__": module})
    monkeypatch.setattr(inspect, "getfile", lambda backend: str(package / home))
    candidate = Candidate.of("mine", moved, "a-package", by_default=False)
    book.record(Proof(book.identify(candidate, ROW, CPU), COVERAGE, ("causal",), utc_now()))
    assert book.find(candidate, ROW, CPU) is not None
    (package / edited).write_text("# and as it is\n")
    assert (book.find(candidate, ROW, CPU) is not None) is stays


def test_a_backend_without_a_file_is_refused(book: ProofBook) -> None:
    nowhere = type("Nowhere", (Mine,), {"__module__": "builtins"})
    with pytest.raises(ConfigError, match="expected backend 'mine' in a file"):
        book.find(replace(MINE, load=lambda: nowhere), ROW, CPU)


def test_a_proven_need_leaves_no_doubt(book: ProofBook) -> None:
    prove(book)
    assert book.doubts(MINE, ROW, NEED) == ()


def test_an_unproven_row_comes_with_the_command_that_proves_it(book: ProofBook) -> None:
    reason = "not proven on this device with these versions; run: sightline conformance --backend mine"
    assert book.doubts(MINE, ROW, NEED) == (reason,)
    assert book.doubts(MINE, ROW, replace(NEED, device=CARD)) == (f"{reason} --device cuda",)


def test_what_a_spec_asks_for_and_was_not_tried_is_named_with_the_command(book: ProofBook) -> None:
    prove(book)
    need = replace(NEED, spec=SoftmaxSpec(6, 2, 96, 0.125), page_size=48)
    assert book.doubts(MINE, ROW, need) == (
        "not proven: query heads on a key head 3 (proven: 1, 2), head dimension 96 (proven: 64, 128), "
        "page size 48 (proven: 1, 16); run: sightline conformance --backend mine",
    )
    assert book.doubts(MINE, ROW, replace(NEED, dtype=torch.float16, cache_dtype=torch.float64)) == (
        "not proven: dtype float16 (proven: float32), cache dtype float64 (proven: float32); "
        "run: sightline conformance --backend mine",
    )


DEMANDS: dict[str, tuple[Demand, str]] = {
    "nothing more": (Demand({Dimension.ROWS: Span(1, 8)}, {}), ""),
    "rows": (Demand({Dimension.ROWS: Span(1, 9)}, {}), "rows 1 to 9 (proven: 1 to 8)"),
    "context": (Demand({Dimension.CONTEXT: Span(0, 8)}, {}), "context of a row 0 to 8 (proven: 1 to 8)"),
    "layers": (Demand({Dimension.LAYERS: Span(3, 3)}, {}), "layers of a group 3 (proven: none)"),
    "window": (Demand({Dimension.WINDOW: Span(3, 3)}, {}), "window 3 (proven: none)"),
    "a mask": (Demand({}, {Dimension.MASK: frozenset({"full"})}), "mask full (proven: none)"),
    "two together": (
        Demand({Dimension.ROWS: Span(1, 8), Dimension.CONTEXT: Span(1, 8)}, {}),
        "rows 8 with context of a row 1 (proven: 8 with 8, 1 with 1), "
        "rows 1 with context of a row 8 (proven: 1 with 1, 8 with 8)",
    ),
}


@pytest.mark.parametrize(("demand", "missing"), DEMANDS.values(), ids=DEMANDS.keys())
def test_what_an_engine_will_ask_for_beyond_the_proof_is_told_with_the_command_that_proves_it(
    book: ProofBook, demand: Demand, missing: str
) -> None:
    prove(book)
    doubt = book.doubting(["conformance", "--model", "a model", "--max-num-seqs", "9"])
    command = "sightline conformance --model 'a model' --max-num-seqs 9"
    expected = (f"not proven: {missing}; run: {command}",) if missing else ()
    assert doubt(MINE, ROW, replace(NEED, demands=(demand,))) == expected


def test_of_many_gaps_the_first_are_told_and_the_others_counted(book: ProofBook) -> None:
    prove(book)
    masks = frozenset({"a", "b", "c", "d", "e", "f"})
    [doubt] = book.doubts(MINE, ROW, replace(NEED, demands=(Demand({}, {Dimension.MASK: masks}),) * 2))
    assert doubt.startswith("not proven: mask a (proven: none), mask b (proven: none), ")
    assert ", mask d (proven: none), and 2 more; run: " in doubt


def test_an_engine_that_is_not_proven_at_all_is_told_its_own_command(book: ProofBook) -> None:
    [doubt] = book.doubting(["conformance", "--model", "m"])(MINE, ROW, NEED)
    assert doubt == "not proven on this device with these versions; run: sightline conformance --model m"


def test_a_new_proof_takes_the_place_of_the_earlier_one(book: ProofBook) -> None:
    prove(book, coverage=coverage_of(page_sizes=(16, 48)))
    prove(book, coverage=coverage_of(page_sizes=(16, 56)))
    found = book.find(MINE, ROW, CPU)
    assert found is not None
    assert found.coverage.values[Dimension.PAGE_SIZE] == {16, 56}
    assert len(list(book.folder.iterdir())) == 1


def test_a_proof_that_no_longer_holds_says_what_has_changed(book: ProofBook) -> None:
    identity = book.identify(MINE, ROW, CPU)
    older = replace(identity, sources="other", versions=(("torch", "1.0"),))
    book.record(Proof(older, COVERAGE, ("causal",), "2026-01-02T03:04:05+00:00"))
    [doubt] = book.doubts(MINE, ROW, NEED)
    assert doubt.startswith("proven 2026-01-02 and not since: changed are sources, its own or Sightline's, ")
    assert "the version of torch" in doubt
    assert doubt.endswith("; run: sightline conformance --backend mine")


def test_a_void_proof_is_gone(book: ProofBook) -> None:
    prove(book)
    identity = book.identify(MINE, ROW, CPU)
    assert book.void(identity)
    assert book.find(MINE, ROW, CPU) is None
    assert not book.void(identity)


def test_proofs_are_the_users_own(book: ProofBook) -> None:
    book.folder.mkdir(parents=True, mode=0o755)
    path = prove(book)
    assert stat.S_IMODE(book.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"expected a folder for proofs that can be written, got .*set XDG_CACHE_HOME"
    ):
        ProofBook(tmp_path / "file" / "proofs").prepare()


def test_a_write_that_fails_leaves_the_earlier_proof(book: ProofBook, monkeypatch: pytest.MonkeyPatch) -> None:
    path = prove(book)
    before = path.read_text()

    def fail(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        prove(book)
    assert path.read_text() == before
    assert list(book.folder.iterdir()) == [path]


def changed(text: str, *keys: str, value: object) -> str:
    data = json.loads(text)
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return json.dumps(data)


MALFORMED: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut off": lambda text: text[:100],
    "not JSON": lambda text: "proven, honestly",
    "a list": lambda text: "[1, 2]",
    "a number": lambda text: "7",
    "nested without end": lambda text: "[" * 100_000,
    "another format": lambda text: changed(text, "format", value=1),
    "no checks": lambda text: changed(text, "checks", value=[]),
    "checks in a string": lambda text: changed(text, "checks", value=7),
    "numbers in words": lambda text: changed(text, "coverage", "values", "HEAD_DIM", value=[[64]]),
    "an unknown column": lambda text: changed(text, "coverage", "colours", value=[]),
    "an unknown dimension": lambda text: changed(text, "coverage", "values", "COLOUR", value=["red"]),
    "a span of words": lambda text: changed(text, "coverage", "spans", value={"ROWS": ["1", "2"]}),
    "a span from high to low": lambda text: changed(text, "coverage", "spans", value={"ROWS": [2, 1]}),
    "coverage in a list": lambda text: changed(text, "coverage", value=[]),
    "a value that is none": lambda text: changed(text, "coverage", "values", "PAGE_SIZE", value=[None]),
    "no coverage": lambda text: changed(text, "coverage", value={}),
    "something more": lambda text: changed(text, "colours", value=[]),
    "no date": lambda text: changed(text, "date", value="yesterday"),
    "a date without a zone": lambda text: changed(text, "date", value="2026-01-01T00:00:00"),
    "of another device": lambda text: changed(text, "identity", "device_name", value="card"),
    "versions that are no pairs": lambda text: changed(text, "identity", "versions", value=["torch"]),
}


@pytest.mark.parametrize("damage", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_file_is_no_proof_and_is_named(book: ProofBook, damage: Callable[[str], str]) -> None:
    path = prove(book)
    path.write_text(damage(path.read_text()))
    assert book.find(MINE, ROW, CPU) is None
    (doubt,) = book.doubts(MINE, ROW, NEED)
    assert doubt.startswith(f"its proof, {path}, is not trusted: expected a proof")
    assert doubt.endswith("run: sightline conformance --backend mine")
    (named,) = book.distrusted()
    assert named.startswith(f"{path}: expected a proof")


def test_bytes_that_are_no_text_are_no_proof(book: ProofBook) -> None:
    path = prove(book)
    path.write_bytes(b"\xff\xfe{}")
    assert book.find(MINE, ROW, CPU) is None


def test_a_good_run_replaces_a_malformed_file(book: ProofBook) -> None:
    path = prove(book)
    path.write_text("{")
    prove(book)
    assert book.find(MINE, ROW, CPU) is not None


def test_a_proof_under_another_name_is_foreign(book: ProofBook) -> None:
    path = prove(book)
    path.rename(path.with_name("mine.json"))
    assert book.find(MINE, ROW, CPU) is None
    assert "expected a proof of what its name says" in book.distrusted()[0]


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_is_not_trusted(book: ProofBook, mode: int) -> None:
    path = prove(book)
    path.chmod(mode)
    assert book.find(MINE, ROW, CPU) is None
    assert "this user alone" in book.distrusted()[0]


def test_a_file_of_another_user_is_not_trusted(book: ProofBook, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(book)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert book.find(MINE, ROW, CPU) is None
