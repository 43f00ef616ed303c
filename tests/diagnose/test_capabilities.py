"""What is shown of a backend is what it declares, and nothing is called proven that is not."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from sightline.attention.backends import registry
from sightline.attention.backends.reference.backend import ReferenceBackend
from sightline.attention.capability import ANY, Capability, GraphLevel, HostLengths
from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.proof import Proof, ProofBook
from sightline.attention.selection import Candidate
from sightline.core.device import Device, DeviceKind
from sightline.core.errors import ConfigError
from sightline.diagnose.capabilities import MatrixRow, capability_matrix, capability_page
from support.coverages import coverage_of

CPU = Device(DeviceKind.CPU, torch.device("cpu"), "cpu", None)
CARD = Device(DeviceKind.CUDA, torch.device("cuda", 0), "card", (9, 0))
PAGE = Path(__file__).parents[2] / "docs" / "capabilities.md"
ROW = Capability(
    spec_kinds=frozenset({SpecKind.SOFTMAX}),
    devices=frozenset(DeviceKind),
    compute_capabilities=frozenset({(9, 0), (12, 1)}),
    dtypes=frozenset({torch.float32}),
    cache_dtypes=frozenset({torch.float32, torch.float8_e4m3fn}),
    head_dims=frozenset({64, 128}),
    group_sizes=ANY,
    page_sizes=ANY,
    features=frozenset({Feature.WINDOW}),
    host_lengths=HostLengths.BOUND,
    graph=GraphLevel.FULL,
)


class Mine(ReferenceBackend):
    capabilities: ClassVar[tuple[Capability, ...]] = (ROW,)


MINE = Candidate.of("mine", Mine, "a-package", by_default=False)


def matrix_row(folder: Path, device: Device, *, proven: bool) -> MatrixRow:
    book = ProofBook(folder)
    if proven:
        coverage = coverage_of((64, 128), (1, 2), (16, 1))
        book.record(Proof(book.identify(MINE, ROW, device), coverage, ("causal",), "2026-02-03T04:05:06+00:00"))
    (row,) = capability_matrix([MINE], device, book).rows
    return row


def test_the_page_of_the_documents_is_up_to_date() -> None:
    assert PAGE.read_text() == capability_page(registry.BUILT_IN), (
        f"{PAGE.name} is out of date; run: sightline capabilities --markdown > docs/capabilities.md"
    )


def test_the_page_says_everything_that_rows_declare() -> None:
    lines = capability_page([MINE]).splitlines()
    for line in (
        "## mine",
        "|  | float32 |",
        "| ranks for prefill, decode, few rows, one row | 0, 0, 0, 0 |",
        "| attention | softmax |",
        "| devices | cpu, cuda |",
        "| compute capabilities | 9.0, 12.1 |",
        "| dtypes | float32 |",
        "| cache dtypes | float32, float8_e4m3fn |",
        "| head dimensions | 64, 128 |",
        "| group sizes | any |",
        "| page sizes | any |",
        "| lengths on the host | bound |",
        "| graph | full |",
        "| package | – |",
        "| window | declared |",
        "| sinks | no |",
    ):
        assert line in lines
    table = [line for line in lines if line.startswith("|")]
    told = [field for field in fields(Capability) if field.name != "features"]
    assert len(table) == 2 + len(told) + len(Feature)


def test_what_has_no_proof_is_declared(tmp_path: Path) -> None:
    row = matrix_row(tmp_path, CPU, proven=False)
    assert row.cell("page_sizes") == "any · declared"
    assert (row.feature(Feature.WINDOW), row.feature(Feature.SINKS)) == ("declared", "no")


def test_what_has_a_proof_is_proven_as_far_as_it_was_tried(tmp_path: Path) -> None:
    row = matrix_row(tmp_path, CPU, proven=True)
    assert row.cell("dtypes") == "float32 · proven 2026-02-03"
    assert row.cell("cache_dtypes") == "float32, float8_e4m3fn · proven 2026-02-03: float32"
    assert row.cell("head_dims") == "64, 128 · proven 2026-02-03"
    assert row.cell("page_sizes") == "any · proven 2026-02-03: 1, 16"
    assert row.cell("host_lengths") == "bound · proven 2026-02-03"
    assert (row.feature(Feature.WINDOW), row.feature(Feature.SINKS)) == ("proven 2026-02-03", "no")


@pytest.mark.parametrize("column", ["devices", "compute_capabilities", "package"])
def test_where_a_row_runs_is_not_proven_by_one_device(tmp_path: Path, column: str) -> None:
    assert "proven" not in matrix_row(tmp_path, CPU, proven=True).cell(column)


def test_graphs_are_proven_by_a_device_that_has_them(tmp_path: Path) -> None:
    assert matrix_row(tmp_path, CPU, proven=True).cell("graph") == "full · declared"
    assert matrix_row(tmp_path, CARD, proven=True).cell("graph") == "full · proven 2026-02-03"


def test_a_proof_on_another_device_does_not_count(tmp_path: Path) -> None:
    matrix_row(tmp_path, CARD, proven=True)
    assert matrix_row(tmp_path, CPU, proven=False).proof is None


def test_lines_tell_why_a_row_is_of_no_use_here_and_which_backend_is_broken(tmp_path: Path) -> None:
    def load() -> type[ReferenceBackend]:
        raise ConfigError("no kernel")

    other = replace(CARD, compute_capability=(10, 0))
    matrix = capability_matrix(
        [MINE, Candidate("broken", False, "x", load, lambda: load().capabilities)], other, ProofBook(tmp_path)
    )
    lines = matrix.lines()
    assert lines[0] == "mine · float32 (a-package)"
    assert lines[1] == "  not on this device: does not list compute capability (10, 0)"
    assert lines[-1] == "broken: no kernel"


def test_the_matrix_is_json(tmp_path: Path) -> None:
    matrix_row(tmp_path, CPU, proven=True)
    data = json.loads(json.dumps(capability_matrix([MINE], CPU, ProofBook(tmp_path)).to_data()))
    (row,) = data["rows"]
    assert (row["backend"], row["distribution"], row["row"], row["unavailable"]) == ("mine", "a-package", "float32", [])
    assert row["declared"]["features"] == ["window"]
    assert row["declared"]["compute_capabilities"] == [[9, 0], [12, 1]]
    assert row["proof"]["coverage"]["values"]["PAGE_SIZE"] == [1, 16]
