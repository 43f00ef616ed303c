"""A model that is divided among ranks gives the logits of the whole one."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from sightline.attention.spec import SoftmaxSpec
from sightline.cache.layout import Layout, arrange_free_pages
from sightline.core.config import EngineConfig
from sightline.core.ledger import Ledger
from sightline.distributed.collectives import NO_LINKS, Links
from sightline.models.loading.opening import open_checkpoint
from sightline.runner.build import build_runtime
from sightline.runner.roles import Role
from sightline.testing.conformance.engine_proof import open_blueprint
from sightline.testing.conformance.rig import Unused, fill_pools
from support.hybrids import HYBRIDS, make_hybrid
from support.rank_threads import of_ranks
from support.tiny_deepseek_v4 import make_v4
from support.tiny_models import FAMILIES, make_model, random_prompts, relative_error, stepped_logits
from support.tiny_sparse import SPARSE, make_sparse

LENGTHS, DECODED, CHUNK = (5, 19, 33), 6, 7
TOLERANCE = 1e-5


class Among(Role):
    """A rank that runs every step by itself."""

    num_others = 0

    def __init__(self, links: Links) -> None:
        self.links = links


def logits_of(folder: Path, links: Links, texts: int = 0) -> list[Tensor]:
    """Of ragged prompts in chunks and some decode steps, over poisoned, shuffled pools. `texts` chooses the prompts."""
    ledger, joins = Ledger(), links.place.num_replicas > 1
    config = EngineConfig(page_size=4, dtype="float32", cache_tokens=512, max_num_seqs=4, enable_expert_parallel=joins)
    runtime = build_runtime(config, open_checkpoint(folder, ledger), ledger, role=Among(links))
    assert runtime.definition.exchanges_rows == joins
    fill_pools(runtime.store, Unused.NAN)
    arrange_free_pages(runtime.store, Layout.SHUFFLED, seed=3)
    sequences = random_prompts([length + DECODED for length in LENGTHS], seed=2 + texts)
    return stepped_logits(runtime, sequences, LENGTHS, CHUNK)


def assert_ranks_equal_one(folder: Path, size: int, num_replicas: int = 1) -> None:
    """Each replica computes other texts."""
    whole = [logits_of(folder, NO_LINKS, replica) for replica in range(num_replicas)]
    for index, parts in enumerate(
        of_ranks(size, lambda links: logits_of(folder, links, links.place.replica.index), num_replicas)
    ):
        wanted = whole[index * num_replicas // size]
        assert max(relative_error(got, each) for got, each in zip(parts, wanted, strict=True)) < TOLERANCE


def _save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.prove)])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_give_the_logits_of_one(family: str, size: int, tmp_path: Path) -> None:
    assert_ranks_equal_one(_save(make_model(family), tmp_path), size)


@pytest.mark.prove
@pytest.mark.parametrize("family", HYBRIDS)
def test_ranks_of_hybrids(family: str, tmp_path: Path) -> None:
    assert_ranks_equal_one(_save(make_hybrid(family), tmp_path), 2)


@pytest.mark.prove
@pytest.mark.parametrize("family", SPARSE)
def test_ranks_of_sparse_models(family: str, tmp_path: Path) -> None:
    assert_ranks_equal_one(_save(make_sparse(family), tmp_path), 2)


WITH_EXPERTS = {
    "qwen3_moe": lambda: make_model("qwen3_moe"),
    "gpt_oss": lambda: make_model("gpt_oss"),
    "deepseek_v3": lambda: make_model("deepseek_v3"),
    "qwen3_next": lambda: make_hybrid("qwen3_next"),
    "nemotron_h_narrow": lambda: make_hybrid("nemotron_h_narrow"),
    "deepseek_v32": lambda: make_sparse("deepseek_v32"),
    "deepseek_v4": lambda: make_v4("deepseek_v4"),
}
"""Experts that are stored separately or stacked, beside shared ones, behind narrow projections, or listed by token."""


@pytest.mark.parametrize("grid", [(2, 2), pytest.param((4, 2), marks=pytest.mark.prove)], ids=["2x1", "2x2"])
@pytest.mark.parametrize(
    "family", [name if name == "gpt_oss" else pytest.param(name, marks=pytest.mark.prove) for name in WITH_EXPERTS]
)
def test_replicas_compute_their_experts_together(family: str, grid: tuple[int, int], tmp_path: Path) -> None:
    size, num_replicas = grid
    assert_ranks_equal_one(_save(WITH_EXPERTS[family](), tmp_path), size, num_replicas)


def test_what_must_be_proven_has_the_heads_of_a_rank(tmp_path: Path) -> None:
    folder = str(_save(make_model("llama"), tmp_path))
    for size, heads in ((1, (6, 2)), (2, (3, 1))):
        blueprint = open_blueprint(EngineConfig(folder, tensor_parallel_size=size, cache_tokens=512), Ledger())
        [group] = blueprint.groups
        assert isinstance(group.spec, SoftmaxSpec)
        assert (group.spec.num_q_heads, group.spec.num_kv_heads) == heads


def test_a_time_limit_of_ranks_that_are_not_there_is_in_the_ledger(tmp_path: Path) -> None:
    folder, ledger = str(_save(make_model("llama"), tmp_path)), Ledger()
    open_blueprint(EngineConfig(folder, dist_timeout=3.0, cache_tokens=512), ledger)
    assert [each.subject for each in ledger.degradations] == ["dist_timeout"]


@pytest.mark.parametrize(
    ("family", "settings", "told"),
    [
        ("gpt_oss", {}, "there is one process, which has all experts"),
        ("llama", {"data_parallel_size": 2}, "the model has no experts"),
    ],
)
def test_experts_that_cannot_be_joined_are_in_the_ledger(
    family: str, settings: dict[str, int], told: str, tmp_path: Path
) -> None:
    folder, ledger = str(_save(make_model(family), tmp_path)), Ledger()
    open_blueprint(EngineConfig(folder, enable_expert_parallel=True, cache_tokens=512, **settings), ledger)  # type: ignore[arg-type]
    assert [(each.subject, each.outcome) for each in ledger.degradations] == [("enable_expert_parallel", told)]


def test_ranks_of_one_replica_divide_experts_in_any_case(tmp_path: Path) -> None:
    folder, ledger = str(_save(make_model("gpt_oss"), tmp_path)), Ledger()
    open_blueprint(EngineConfig(folder, enable_expert_parallel=True, tensor_parallel_size=2, cache_tokens=512), ledger)
    assert not ledger.degradations
    assert "enable_expert_parallel" in [each.subject for each in ledger.notes]
