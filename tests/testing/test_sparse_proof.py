"""An engine with sparse layers is proven for the number of tokens that its indexers choose."""

from __future__ import annotations

from pathlib import Path

import pytest

from sightline.attention.dimensions import Dimension
from sightline.attention.kinds import SpecKind
from sightline.attention.proof import ProofBook
from sightline.core.config import EngineConfig
from sightline.testing.conformance.engine_proof import EngineReport, prove_engine
from support.tiny_sparse import TOP_K, make_sparse


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> EngineReport:
    folder: Path = tmp_path_factory.mktemp("sparse")
    make_sparse("glm_moe_dsa").save_pretrained(folder)
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32, "cache_tokens": 256}
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", **sizes)  # type: ignore[arg-type]
    return prove_engine(config, book=ProofBook(folder / "proofs"), checks=())


def test_cases_cover_what_both_groups_will_be_asked_for(report: EngineReport) -> None:
    found = {each.duty.group.spec.kind: [result.detail for result in each.failed] for each in report.duties}
    assert found == {SpecKind.LATENT: [], SpecKind.INDEX: []}
    assert report.is_proven


def test_the_number_of_chosen_tokens_is_demanded(report: EngineReport) -> None:
    for duty in (each.duty for each in report.duties):
        assert {demand.values[Dimension.TOP_K] for demand in duty.demands} == {frozenset({TOP_K})}
        assert {demand.values[Dimension.FEATURES] for demand in duty.demands} == {frozenset({"sparse"})}
