"""A run for an engine proves what that engine will ask for, and says what it does not cover."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sightline.attention.backends import registry
from sightline.attention.capability import Work
from sightline.attention.contract import StepView
from sightline.attention.coverage import Coverage, Demand
from sightline.attention.dimensions import Dimension, Span
from sightline.attention.kinds import Feature, SpecKind
from sightline.attention.proof import ProofBook
from sightline.attention.selection import Candidate
from sightline.core.config import EngineConfig
from sightline.core.errors import CheckpointError, NoBackendError, UnsupportedModelError
from sightline.core.ledger import Ledger
from sightline.llm import LLM
from sightline.models.loading.default_model import default_model_path
from sightline.testing.conformance import case_run, engine_proof
from sightline.testing.conformance.checks import CHECKS, covering
from sightline.testing.conformance.engine_proof import (
    Duty,
    EngineReport,
    EngineWatch,
    list_duties,
    narrowed,
    open_blueprint,
    prove_engine,
    uncovered,
)
from sightline.testing.conformance.kit import Verdict
from support.hybrids import make_hybrid
from support.tiny_bert import make_bert, save_embedder
from support.tiny_models import _common, make_model, with_weights
from support.tiny_qwen_hybrid import QWEN_HYBRID
from support.wrong_backends import wrong_candidate

SOME = tuple(
    check for check in CHECKS if check.name in ("built", "cache-write", "causal", "window", "state-write", "delta-rule")
)
"""Soon done: the kit has its own tests."""
SMALL: dict[str, Any] = {
    "max_model_len": 40,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 12,
    "page_size": 4,
    "cache_tokens": 120,
    "device": "cpu",
    "attention_backend": "torch",
}
"""The portable backend, which compiles nothing."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            make_model(family).save_pretrained(made[family])
        return made[family]

    return folder


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory, folders: Callable[[str], Path]) -> Path:
    """A folder of proofs for the small llama."""
    book = ProofBook(tmp_path_factory.mktemp("proven"))
    assert prove(book, folders("llama")).is_proven
    return book.folder


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProofBook:
    """The user's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return ProofBook(tmp_path / "sightline" / "proofs")


@pytest.fixture
def proven_book(book: ProofBook, proven: Path) -> ProofBook:
    shutil.copytree(proven, book.folder)
    return book


def prove(book: ProofBook, model: Path, *candidates: Candidate, **changes: Any) -> EngineReport:
    run = {name: changes.pop(name) for name in ("again", "seconds", "watch") if name in changes}
    any_backend = {"attention_backend": None} if candidates else {}
    config = EngineConfig(model=str(model), **SMALL | any_backend | changes)
    return prove_engine(config, book=book, candidates=candidates or None, checks=SOME, **run)


def duties_of(model: Path, **changes: Any) -> tuple[Duty, ...]:
    blueprint = open_blueprint(EngineConfig(model=str(model), **SMALL | changes), Ledger())
    return list_duties(blueprint, registry.installed())


def test_a_duty_is_a_row_a_group_and_the_rows_that_it_serves(folders: Callable[[str], Path]) -> None:
    sliding, full = duties_of(folders("gemma3"))
    assert (len(sliding.group.layers), len(full.group.layers)) == (3, 1)
    assert list(sliding.needs) == [Work.PREFILL, Work.FEW, Work.ALONE]
    assert sliding.identity == full.identity
    assert {span for demand in sliding.demands for span in [demand.scales[Dimension.WINDOW]]} == {Span(10, 10)}
    assert all(Dimension.WINDOW not in demand.scales for demand in full.demands)
    prefill, decode = duties_of(folders("llama"), decode_attention_backend="reference")
    assert (prefill.candidate.name, list(prefill.needs)) == ("torch", [Work.PREFILL])
    assert (decode.candidate.name, list(decode.needs)) == ("reference", [Work.FEW, Work.ALONE])


def test_a_row_is_narrowed_to_what_the_engine_uses(folders: Callable[[str], Path]) -> None:
    duty = duties_of(folders("gpt_oss"))[0]
    need = duty.needs[Work.PREFILL]
    row: Any = narrowed(duty.capability, need)
    assert row.spec_kinds == {SpecKind.SOFTMAX}
    assert (row.head_dims, row.group_sizes, row.page_sizes) == ({8}, {3}, {4})
    assert (row.dtypes, row.cache_dtypes) == ({torch.float32}, {torch.float32})
    assert row.features == {Feature.WINDOW, Feature.SINKS}
    narrow: Any = narrowed(duty.capability, replace(need, cache_dtype=torch.float8_e4m3fn))
    assert narrow.cache_dtypes == {torch.float8_e4m3fn, torch.float32}


def test_what_an_engine_asks_for_is_proven_and_the_engine_then_starts(
    book: ProofBook, folders: Callable[[str], Path]
) -> None:
    folder = folders("gemma3")
    settings = SMALL | {"require_proof": True, "skip_tokenizer_init": True}
    with pytest.raises(NoBackendError, match="torch: not proven on this device with these versions; run: sightline "):
        LLM(str(folder), **settings)
    told: list[str] = []
    watch = EngineWatch(lambda duty: told.append(duty.group.name), lambda result: told.append(result.check))
    report = prove(book, folder, watch=watch)
    assert report.is_proven
    assert [each.gaps for each in report.duties] == [(), ()]
    assert told[0] == "group0"
    assert told[-1] == "covering decode of one row"
    assert all(work.num_cases > 5 for each in report.duties for work in each.works)
    assert {result.verdict for each in report.duties for result in each.results} == {Verdict.PASSED, Verdict.EXCUSED}
    LLM(str(folder), **settings)


def test_every_group_of_a_hybrid_is_proven_and_the_engine_then_starts(book: ProofBook, tmp_path: Path) -> None:
    make_hybrid("qwen3_next").save_pretrained(tmp_path / "model")
    settings = SMALL | {"max_num_seqs": 2, "attention_backend": None, "model": str(tmp_path / "model")}
    candidates = [registry.find(name, registry.BUILT_IN) for name in ("torch", "torch-recurrent")]
    report = prove_engine(EngineConfig(**settings), book=book, candidates=candidates, checks=SOME)
    assert report.is_proven, [str(gap) for duty in report.duties for gap in duty.gaps]
    served = {duty.duty.group.spec.kind: duty.duty.candidate.name for duty in report.duties}
    assert served == {SpecKind.SOFTMAX: "torch", SpecKind.RECURRENT: "torch-recurrent"}
    [recurrent] = [duty for duty in report.duties if duty.duty.group.is_recurrent]
    assert {"state-write", "delta-rule"} <= {result.check for result in recurrent.results}
    assert all(work.num_cases for work in recurrent.works)
    with pytest.raises(NoBackendError, match="not proven: rows 1 to 3"):
        LLM(**settings | {"max_num_seqs": 3, "require_proof": True})


def test_backends_that_share_an_engine_are_proven_for_what_they_serve(
    book: ProofBook, folders: Callable[[str], Path]
) -> None:
    pytest.importorskip("numba")
    settings = SMALL | {"require_proof": True, "skip_tokenizer_init": True, "decode_attention_backend": "numba"}
    assert prove(book, folders("llama")).is_proven
    with pytest.raises(NoBackendError, match="numba: not proven"):
        LLM(str(folders("llama")), **settings)
    report = prove(book, folders("llama"), decode_attention_backend="numba", again=True)
    assert report.is_proven
    works = {each["backend"]: set(each["cases"]) for each in report.to_data()["duties"]}
    assert works == {"torch": {"prefill"}, "numba": {"decode of few rows", "decode of one row"}}
    LLM(str(folders("llama")), **settings)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"max_num_seqs": 4}, "rows 1 to 4 (proven: 1 to 3)"),
        ({"max_model_len": 90}, "context of a row 0 to 89 (proven: "),
        ({"page_size": 8}, "page size 8 (proven: 4)"),
        ({"dtype": "float16", "attention_backend": "reference"}, "not proven on this device"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_an_engine_that_asks_for_more_than_is_proven_is_refused_with_what_is_missing(
    proven_book: ProofBook, folders: Callable[[str], Path], changes: dict[str, Any], missing: str
) -> None:
    folder = folders("llama")
    asked = SMALL | changes
    with pytest.raises(NoBackendError) as refused:
        LLM(str(folder), **asked, require_proof=True, skip_tokenizer_init=True)
    assert missing in str(refused.value)
    assert f"run: sightline conformance --model {folder} " in str(refused.value)
    for flag, name in (("--page-size", "page_size"), ("--max-num-seqs", "max_num_seqs")):
        assert f"{flag} {asked[name]}" in str(refused.value)


def test_a_model_with_more_layers_or_another_window_is_not_proven_by_the_first(
    book: ProofBook, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    original = json.loads((folders("mistral") / "config.json").read_text())
    assert prove(book, folders("mistral")).is_proven
    for name, value, missing in (
        ("num_hidden_layers", 5, "layers of a group 5 (proven: 1 to 2)"),
        ("sliding_window", 12, "window 12 (proven: 9)"),
        ("num_attention_heads", 8, "query heads on a key head 4 (proven: 3)"),
        ("head_dim", 16, "head dimension 16 (proven: 8)"),
    ):
        changed = tmp_path / f"{name}.json"
        changed.write_text(json.dumps(original | {name: value}))
        [duty] = duties_of(changed)
        proof = book.find(duty.candidate, duty.capability, duty.needs[Work.PREFILL].device)
        assert proof is not None
        told = [str(gap) for gap in uncovered(proof.coverage, duty.demands)]
        assert missing.split(" (")[0] in {each.split(" (")[0] for each in told}, told


def test_what_is_covered_already_is_not_tried_again_unless_asked(
    proven_book: ProofBook, folders: Callable[[str], Path]
) -> None:
    for changes in ({}, {"max_model_len": 20, "max_num_seqs": 2}):
        covered = prove(proven_book, folders("llama"), **changes)
        assert (covered.is_proven, covered.duties[0].row) == (True, None)
    assert prove(proven_book, folders("llama"), again=True).duties[0].row is not None


def test_what_was_proven_before_stays_proven(proven_book: ProofBook, folders: Callable[[str], Path]) -> None:
    book = proven_book
    assert prove(book, folders("llama"), page_size=8).is_proven
    for page_size in (4, 8):
        assert prove(book, folders("llama"), page_size=page_size).duties[0].row is None


def layers_from(first: int) -> Callable[[StepView, int], bool]:
    return lambda step, layer: layer >= first


FAULTS: dict[str, Callable[[StepView, int], bool]] = {
    "the last layer": layers_from(2),
    "as many rows as may be": lambda step, _: step.batch.num_rows >= 3,
    "the longest context": lambda step, _: max(step.batch.context_lens.exact(), default=0) >= 39,
    "the longest step": lambda step, _: step.batch.num_tokens >= 12,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_backend_that_is_wrong_at_the_end_of_what_the_engine_asks_is_not_proven(
    book: ProofBook, folders: Callable[[str], Path], fault: Callable[[StepView, int], bool]
) -> None:
    report = prove(book, folders("llama"), wrong_candidate("wrong", fault))
    assert not report.is_proven
    [duty] = report.duties
    assert [result.check.split()[0] for result in duty.failed] == ["covering"]
    assert duty.gaps
    assert list(book.folder.iterdir()) == []


def test_a_fault_beyond_what_the_engine_asks_for_is_nothing_to_it(
    book: ProofBook, folders: Callable[[str], Path]
) -> None:
    assert prove(book, folders("llama"), wrong_candidate("wrong", layers_from(3))).is_proven


def test_a_failure_voids_what_was_proven(book: ProofBook, folders: Callable[[str], Path]) -> None:
    wrong = wrong_candidate("wrong", lambda step, _: max(step.batch.context_lens.exact(), default=0) >= 39)
    assert prove(book, folders("llama"), wrong, max_model_len=20).is_proven
    report = prove(book, folders("llama"), wrong)
    assert report.duties[0].voided
    assert list(book.folder.iterdir()) == []


def test_a_pool_that_does_not_fit_is_told_and_not_taken_for_covered(
    book: ProofBook, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_proof, "available_bytes", lambda _device: 20_000)
    report = prove(book, folders("llama"), cache_tokens=400)
    assert not report.is_proven
    assert report.duties[0].failed == ()
    assert any("slots of a pool 404" in str(gap) for gap in report.duties[0].gaps)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), RuntimeError("you tried: can't allocate memory: no")])
def test_a_case_that_does_not_fit_in_memory_is_told_and_not_taken_for_covered(
    book: ProofBook, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    try_case = case_run.try_case

    def cramped(trial: Any, case: Any) -> None:
        if case.point()[Dimension.ROWS] == 3:
            raise error
        try_case(trial, case)

    monkeypatch.setattr(covering, "try_case", cramped)
    report = prove(book, folders("llama"))
    assert (report.is_proven, report.duties[0].failed) == (False, ())
    assert any(str(gap).startswith("rows 1 to 3 (proven: ") for gap in report.duties[0].gaps)
    assert "does not fit in memory" in report.duties[0].works[0].left_out[0]


def test_what_a_budget_leaves_is_told(book: ProofBook, folders: Callable[[str], Path]) -> None:
    report = prove(book, folders("llama"), seconds=0.05)
    assert (report.is_proven, report.duties[0].failed) == (False, ())
    assert report.duties[0].gaps
    assert prove(book, folders("llama")).is_proven


def test_a_config_alone_a_gguf_file_and_a_folder_are_the_same_to_attention(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    def shape(model: Path) -> list[tuple[int, object]]:
        blueprint = open_blueprint(EngineConfig(model=str(model), **SMALL), Ledger())
        return [(len(group.layers), group.spec) for group in blueprint.groups]

    folder = folders("gpt_oss")
    alone = tmp_path / "config.json"
    alone.write_bytes((folder / "config.json").read_bytes())
    assert shape(alone) == shape(folder)
    [(layers, spec)] = shape(default_model_path())
    assert (layers, getattr(spec, "num_q_heads", None)) == (30, 9)


def test_a_config_alone_demands_what_the_whole_folder_does(folders: Callable[[str], Path], tmp_path: Path) -> None:
    ledger, folder = Ledger(), folders("llama")
    alone = open_blueprint(EngineConfig(model=str(folder / "config.json"), **SMALL), ledger)
    whole = open_blueprint(EngineConfig(model=str(folder), **SMALL), Ledger())
    assert alone.config.memory.weight_bytes == whole.config.memory.weight_bytes > 0
    assert alone.groups == whole.groups
    assert any("their sizes are those that config.json describes" in str(note) for note in ledger.notes)
    assert not any(each.subject == "weights" for each in ledger.degradations)
    other = tmp_path / "other.json"
    other.write_text("[]")
    with pytest.raises(CheckpointError):
        open_blueprint(EngineConfig(model=str(other)), Ledger())
    other.write_text('{"architectures": ["Unheard"]}')
    with pytest.raises(UnsupportedModelError):
        open_blueprint(EngineConfig(model=str(other)), Ledger())


def test_an_embedder_is_proven_as_it_embeds(book: ProofBook, tmp_path: Path) -> None:
    save_embedder(make_bert(), tmp_path / "bert", max_tokens=20)
    settings: dict[str, Any] = {"task": "embed", "max_num_seqs": 3, "max_num_batched_tokens": 30, "device": "cpu"}
    report = prove_engine(EngineConfig(model=str(tmp_path / "bert"), **settings), book=book, checks=SOME)
    assert report.is_proven
    [duty] = report.duties
    for demand in duty.duty.demands:
        assert demand.scales[Dimension.NEW_TOKENS] == Span(1, 20)
        assert demand.values[Dimension.MASK] == {"full"}
    LLM(str(tmp_path / "bert"), **settings, require_proof=True, skip_tokenizer_init=True)


def test_a_report_is_told_in_json(book: ProofBook, folders: Callable[[str], Path]) -> None:
    data = json.loads(json.dumps(prove(book, folders("llama")).to_data()))
    assert data["proven"] is True
    [duty] = data["duties"]
    assert (duty["backend"], duty["status"], duty["not_covered"]) == ("torch", "passed", [])
    assert duty["demands"][0]["ROWS"] == "1 to 3"
    assert duty["cases"].keys() == {"prefill", "decode of few rows", "decode of one row"}


def test_uncovered_tells_each_gap_once() -> None:
    demand = Demand({Dimension.ROWS: Span(1, 2)}, {})
    assert len(uncovered(Coverage.of(()), [demand, demand])) == 1
    assert uncovered(None, [demand]) == uncovered(Coverage.of(()), [demand])


@pytest.mark.prove
def test_the_groups_of_a_hybrid_are_proven(tmp_path: Path) -> None:
    """One of them keeps states, and has no pool that could be larger."""
    with_weights(QWEN_HYBRID["qwen3_5"](_common()).eval()).save_pretrained(tmp_path / "model")
    report = prove(ProofBook(tmp_path / "proofs"), tmp_path / "model")
    kinds = [duty.duty.group.spec.kind for duty in report.duties]
    assert kinds == [SpecKind.RECURRENT, SpecKind.SOFTMAX]
    assert report.is_proven
