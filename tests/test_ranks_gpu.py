"""On an NVIDIA GPU: what ranks do together, by NCCL. One card is one rank, which sums its summands alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from sightline.core.device import detect_device
from sightline.core.ledger import Ledger
from sightline.distributed.collectives import LONE, GroupCollectives, Links
from sightline.distributed.ranks import Place, Rank
from sightline.models.loading.opening import open_checkpoint
from sightline.opening import build_engine_of
from sightline.runner.roles import Leads
from support.led_engines import QueueSender, alone, answers, config_of
from support.tiny_models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def collectives() -> Iterator[GroupCollectives]:
    made = GroupCollectives(Rank(0, 1), HashStore(), detect_device("cuda"), 60.0)
    yield made
    made.close()


def test_collectives_of_one_rank_change_nothing(collectives: GroupCollectives) -> None:
    x = torch.randn(5, 7, device="cuda", dtype=torch.bfloat16)
    for rows in (x.clone(), x.t().contiguous().t()):
        collectives.sum(rows)
        assert torch.equal(rows, x)
    tokens = torch.arange(9, device="cuda")
    collectives.broadcast(tokens)
    assert tokens.tolist() == list(range(9))
    assert torch.equal(collectives.gather(x, [7], dim=1), x)
    assert collectives.least([3, -4]) == [3, -4]
    collectives.limit(5.0)


def test_a_sum_is_captured_in_a_graph(collectives: GroupCollectives) -> None:
    x = torch.ones(64, 128, device="cuda")
    collectives.sum(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        x.mul_(2.0)
        collectives.sum(x)
    for _ in range(3):
        graph.replay()
    assert torch.equal(x, torch.full_like(x, 8.0))


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_an_engine_of_one_rank_answers_in_graphs_as_one_without(
    family: str, tmp_path: Path, collectives: GroupCollectives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer is cut into one part, which is summed."""
    make_model(family).save_pretrained(tmp_path)
    config = config_of(device="cuda")
    expected = answers(alone(tmp_path, config))
    monkeypatch.setattr(Rank, "is_alone", False)
    ledger = Ledger()
    role = Leads(Links(Place(collectives.rank, 1), collectives, collectives, LONE), QueueSender([]))
    engine = build_engine_of(config, open_checkpoint(tmp_path, ledger), ledger, role=role)
    assert answers(engine) == expected
    assert engine.runtime.runner.num_replayed
    engine.close()
