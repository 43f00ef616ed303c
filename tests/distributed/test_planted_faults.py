"""Faults of a division among ranks, planted one at a time: each is noticed, by other tokens or by an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from sightline.cache.told import ToldCache
from sightline.core.batch import Batch
from sightline.core.batch_memory import StepShape
from sightline.core.errors import SightlineError
from sightline.distributed import orders
from sightline.distributed.collectives import GroupCollectives
from sightline.distributed.ranks import Rank
from sightline.engine import launch
from sightline.layers.moe import SeparateExperts
from sightline.layers.summed import SummedEmbedding, SummedMlp
from sightline.models.parts import Slices, Zeros
from sightline.runner import following, roles
from sightline.runner.following import Follower
from sightline.runner.roles import Teller
from sightline.runner.telling import PartTeller
from support.led_engines import PROMPTS, alone, answers, config_of, led_engine, sampled
from support.tiny_models import make_model

Plant = Callable[[pytest.MonkeyPatch], None]


def _shard_loaded_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rank, "share", lambda self, total: range(total // self.size))


def _bias_added_by_every_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Zeros, "of", lambda self, stored: stored)


def _rows_of_another_head(patch: pytest.MonkeyPatch) -> None:
    whole = Slices.of

    def of(self: Slices, stored: Tensor) -> Tensor:
        part = whole(self, stored)
        return part.roll(1, dims=self.dim) if self.dim == 1 else part

    patch.setattr(Slices, "of", of)


def _a_sum_left_out(patch: pytest.MonkeyPatch) -> None:
    def call(self: SummedMlp, source: Any, sink: Any, scratch: Any) -> None:
        self.part(source, sink, scratch)

    patch.setattr(SummedMlp, "__call__", call)


def _tokens_of_an_expert_dropped(patch: pytest.MonkeyPatch) -> None:
    whole = SeparateExperts.__call__

    def call(self: SeparateExperts, x: Tensor, experts: Tensor, weights: Tensor, sink: Any, scratch: Any) -> None:
        if self.held is not None and self.held.start:
            weights = weights.masked_fill(experts == self.held.start, 0.0)
        whole(self, x, experts, weights, sink, scratch)

    patch.setattr(SeparateExperts, "__call__", call)


def _vector_of_a_token_of_another_rank(patch: pytest.MonkeyPatch) -> None:
    whole = SummedEmbedding.__init__

    def init(self: SummedEmbedding, part: Any, tokens: range, collectives: Any) -> None:
        whole(self, part, range(tokens.start + (tokens.start > 0), tokens.stop), collectives)

    patch.setattr(SummedEmbedding, "__init__", init)


def _stale_order_carried_out(patch: pytest.MonkeyPatch) -> None:
    """A rank that gets some orders twice, and looks at no number."""
    last: list[bytes] = []

    def unpacked(message: bytes, number: int) -> orders.Order:
        del number
        last.append(message)
        order: orders.Order = orders._decoder.decode(last[-2] if len(last) % 9 == 0 else message)
        return order

    patch.setattr(following, "unpacked", unpacked)


def _a_page_not_told(patch: pytest.MonkeyPatch) -> None:
    whole = ToldCache.put_pages

    def put_pages(self: ToldCache, pool: int, row: int, first: int, pages: Sequence[int]) -> None:
        whole(self, pool, row, first, pages[:-1])

    patch.setattr(ToldCache, "put_pages", put_pages)


def _copies_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Teller, "copies_page", lambda self, pool, source, target, num_tokens: None)


def _another_bucket(patch: pytest.MonkeyPatch) -> None:
    whole = PartTeller.part

    def part(self: PartTeller, batch: Batch, shape: StepShape | None) -> orders.PartOrder:
        found = whole(self, batch, shape)
        return structs.replace(found, bucket=(found.padded_rows, 1))

    patch.setattr(PartTeller, "part", part)


def _an_idle_replica_skips_the_step(patch: pytest.MonkeyPatch) -> None:
    """The others wait for it in vain."""
    whole = Follower._run

    def run(self: Follower, order: orders.StepOrder) -> None:
        if order.parts[self._replica].rows:
            whole(self, order)

    patch.setattr(Follower, "_run", run)


def _replicas_that_agree_on_no_size(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(launch, "agreed_size", lambda works: None)


def _tokens_of_another_replica(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(roles, "_tokens_of", lambda steps: torch.cat([each.batch.tokens for each in reversed(steps)]))


def _outputs_in_another_order(patch: pytest.MonkeyPatch) -> None:
    whole = GroupCollectives.gather

    def gather(self: GroupCollectives, part: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        found = whole(self, part, sizes, dim)
        return found.roll(sizes[-1], dims=0) if dim == 0 else found

    patch.setattr(GroupCollectives, "gather", gather)


def _experts_without_the_last_rows(patch: pytest.MonkeyPatch) -> None:
    """The experts of one rank drop what the other replica sent."""
    whole = GroupCollectives.sum_of_part

    def sum_of_part(self: GroupCollectives, parts: Tensor, out: Tensor) -> None:
        if self.rank.leads:
            parts[len(out) :] = 0.0
        whole(self, parts, out)

    patch.setattr(GroupCollectives, "sum_of_part", sum_of_part)


def _rows_given_back_to_another_replica(patch: pytest.MonkeyPatch) -> None:
    whole = GroupCollectives.sum_of_part

    def sum_of_part(self: GroupCollectives, parts: Tensor, out: Tensor) -> None:
        whole(self, parts.roll(len(out), dims=0), out)

    patch.setattr(GroupCollectives, "sum_of_part", sum_of_part)


def _copies_told_to_another_replica(patch: pytest.MonkeyPatch) -> None:
    whole = Teller.__init__

    def init(self: Teller, orders: Any, replica: int) -> None:
        whole(self, orders, 0)

    patch.setattr(Teller, "__init__", init)


REPLICA_FAULTS: dict[str, tuple[str, Plant]] = {
    "an idle replica skips the step": ("experts", _an_idle_replica_skips_the_step),
    "replicas agree on no size": ("experts", _replicas_that_agree_on_no_size),
    "the tokens of another replica": ("dense", _tokens_of_another_replica),
    "outputs in another order": ("dense", _outputs_in_another_order),
    "experts drop the rows of another replica": ("experts", _experts_without_the_last_rows),
    "rows are given back to another replica": ("experts", _rows_given_back_to_another_replica),
    "copies are told to another replica": ("dense", _copies_told_to_another_replica),
}
FAULTS: dict[str, tuple[str, Plant]] = {
    "a shard is loaded twice": ("dense", _shard_loaded_twice),
    "a bias is added by every rank": ("dense", _bias_added_by_every_rank),
    "the columns of another head": ("dense", _rows_of_another_head),
    "a sum is left out": ("dense", _a_sum_left_out),
    "the tokens of an expert are dropped": ("experts", _tokens_of_an_expert_dropped),
    "the vector of another token": ("dense", _vector_of_a_token_of_another_rank),
    "a stale order is carried out": ("dense", _stale_order_carried_out),
    "a page is not told": ("dense", _a_page_not_told),
    "copies are not told": ("dense", _copies_not_told),
    "another bucket": ("dense", _another_bucket),
}
MODELS = {"dense": "llama", "experts": "gpt_oss"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in made.items():
        make_model(MODELS[name]).save_pretrained(folder)
    return made


RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "dist_timeout": 10.0}
REPLICAS: dict[str, Any] = {"data_parallel_size": 2, "dist_timeout": 10.0}


def found(folder: Path, **ranks: Any) -> list[tuple[int, ...]]:
    """The tokens of requests that share pages, and of continuations that share a prompt."""
    config = config_of(page_size=4, **ranks)
    params = {"n": 2, "seed": 3, "temperature": 1.0}
    if not ranks:
        engine = alone(folder, config)
        return [*answers(engine), *sampled(engine, **params)]
    with led_engine(folder, config, timeout_s=5.0) as engine:
        return [*answers(engine), *sampled(engine, **params), *answers(engine, PROMPTS[:1])]


def is_noticed(folder: Path, expected: Sequence[tuple[int, ...]], **ranks: Any) -> bool:
    """True if several ranks answer something else, or not at all: `answers` asserts that no request fails."""
    try:
        return found(folder, **ranks) != expected
    except (SightlineError, RuntimeError, AssertionError):
        return True


@pytest.mark.prove
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, plant = FAULTS[fault]
    expected = found(folders[model])
    expected = [*expected, expected[0]]
    assert found(folders[model], **RANKS) == expected, "without the fault"
    plant(monkeypatch)
    assert is_noticed(folders[model], expected, **RANKS), "nobody noticed"


@pytest.mark.prove
@pytest.mark.parametrize("fault", REPLICA_FAULTS)
def test_a_fault_of_replicas_is_found(fault: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, plant = REPLICA_FAULTS[fault]
    settings = REPLICAS | {"enable_expert_parallel": model == "experts"}
    expected = found(folders[model])
    expected = [*expected, expected[0]]
    assert found(folders[model], **settings) == expected, "without the fault"
    plant(monkeypatch)
    assert is_noticed(folders[model], expected, **settings), "nobody noticed"
