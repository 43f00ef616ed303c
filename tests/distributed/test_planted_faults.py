"""Faults of a division among ranks, planted one at a time: each is noticed, by other tokens or by an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from torch import Tensor

from sightline.cache.told import ToldCache
from sightline.core.batch import Batch
from sightline.core.batch_memory import StepShape
from sightline.core.errors import SightlineError
from sightline.distributed import orders
from sightline.distributed.ranks import Rank
from sightline.layers.moe import SeparateExperts
from sightline.layers.summed import SummedEmbedding, SummedMlp
from sightline.models.parts import Slices, Zeros
from sightline.runner import following
from sightline.runner.roles import Teller
from sightline.runner.telling import PartTeller
from support.led_engines import alone, answers, config_of, led_engine, sampled
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


def found(folder: Path, ranks: int) -> list[tuple[int, ...]]:
    """The tokens of requests that share pages, and of continuations that share a prompt."""
    config = config_of(page_size=4, tensor_parallel_size=ranks, dist_timeout=10.0)
    params = {"n": 2, "seed": 3, "temperature": 1.0}
    if ranks == 1:
        engine = alone(folder, config)
        return [*answers(engine), *sampled(engine, **params)]
    with led_engine(folder, config) as engine:
        return [*answers(engine), *sampled(engine, **params)]


def is_noticed(folder: Path, expected: Sequence[tuple[int, ...]]) -> bool:
    """True if two ranks answer something else, or not at all: `answers` asserts that no request fails."""
    try:
        return found(folder, 2) != expected
    except (SightlineError, RuntimeError, AssertionError):
        return True


@pytest.mark.prove
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, plant = FAULTS[fault]
    expected = found(folders[model], 1)
    assert found(folders[model], 2) == expected, "without the fault"
    plant(monkeypatch)
    assert is_noticed(folders[model], expected), "nobody noticed"
