"""Shapes cost what they must, and lie in memory as contenders are promised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sightline.bench.attention import surroundings as surroundings_module
from sightline.bench.attention.data import ShapeData, build_data
from sightline.bench.attention.shapes import SHAPE_SETS, SWEEP_SETS, Shape, find_shapes
from sightline.bench.attention.surroundings import surround
from sightline.core.errors import ConfigError
from support.attention_contenders import (
    CPU,
    MEASURED,
)
from support.dense_attention import attend_dense


@pytest.mark.parametrize(
    ("name", "seconds", "bound", "share"),
    [
        ("gqa-256x2048", 507.6e-6, "bytes", 0.988),
        ("gqa-64x4096", 261.1e-6, "bytes", 0.960),
        ("mla128-128x4096", 281.9e-6, "operations", 0.746),
        ("mla128-16x32768", 277.0e-6, "operations", 0.759),
        ("mla128-32x4096", 81.2e-6, "operations", 0.648),
        ("mla16-128x4096", 158.3e-6, "bytes", 0.891),
        ("prefill-gqa-1x8192", 0.5498e12 / 631e12, "operations", 0.909),
        ("prefill-mla128-1x4096", 0.6873e12 / 605e12, "operations", 0.872),
    ],
)
def test_the_floor_is_the_one_that_peers_were_first_compared_with(
    name: str, seconds: float, bound: str, share: float
) -> None:
    [shape] = find_shapes([name])
    assert MEASURED.floor(shape.attention) / seconds == pytest.approx(share, abs=2e-3)
    assert MEASURED.is_bound_by_bytes(shape.attention) == (bound == "bytes")


def test_a_layer_costs_more_than_its_attention() -> None:
    [shape] = find_shapes(["mla128-1x8192"])
    weights = 128 * (128 + 128) * 512
    assert shape.layer.num_bytes == shape.attention.num_bytes + 576 * 2 + weights * 2
    assert shape.layer.operations == shape.attention.operations + 2 * weights
    [softmax] = find_shapes(["gqa-64x4096"])
    assert softmax.layer.num_bytes - softmax.attention.num_bytes == 64 * 2 * 8 * 128 * 2


def test_the_tables_hold_every_shape_once() -> None:
    assert len(SHAPE_SETS["decode"]) == 10
    assert len(SHAPE_SETS["prefill"]) == 4
    both = find_shapes(["decode", "prefill", "gqa-256x2048"])
    assert len({shape.name for shape in both}) == len(both) == 14
    assert all(shape.page_size == 64 and shape.dtype is torch.bfloat16 for shape in both)
    swept = find_shapes(SWEEP_SETS)
    assert {(shape.num_rows, shape.length) for shape in swept} >= {(1, 512), (8, 32768), (256, 2048)}


def test_an_unknown_shape_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"out of the sets decode, prefill, tiny, .* got 'huge'"):
        find_shapes(["tiny", "huge"])


@pytest.mark.parametrize("shape", SHAPE_SETS["tiny"], ids=lambda shape: shape.name)
def test_what_surrounds_a_kernel_makes_a_layer_of_it(shape: Shape) -> None:
    """Attention as the forms state it, by torch, inside the surroundings that peers get."""
    data = build_data(shape, CPU, 3)
    data.forget()
    around = surround(data)
    around.before(2)
    assert data.error(around.after(2, _attend(data, around, 2))) < data.tolerance
    for plane in data.pool.spec.planes:
        assert not data.pool.plane(plane.name)[2].isnan().any()
        assert data.pool.plane(plane.name)[1].isnan().any()


def _attend(data: ShapeData, around: surroundings_module.Surroundings, layer: int) -> Tensor:
    """Row after row, of what a kernel reads."""
    shape, pool, rows = data.shape, data.pool, data.batch.rows
    tables = [pool.table.pages[row, : -(-shape.length // shape.page_size)] for row in rows]
    slots = [(t[:, None] * shape.page_size + torch.arange(shape.page_size)).flatten()[: shape.length] for t in tables]
    outs = []
    for row, places in enumerate(slots):
        tokens = slice(row * shape.query_len, (row + 1) * shape.query_len)
        match around:
            case surroundings_module.SoftmaxSurroundings(inputs=inputs, keys=keys, values=values):
                q, k, v = inputs.q[tokens], keys[layer, places], values[layer, places]
            case surroundings_module.AbsorbedSurroundings(query=query, latent_dim=latent_dim):
                entries = pool.plane("entry")[layer, places, None]
                q, k, v = query[tokens], entries, entries[..., :latent_dim]
            case surroundings_module.ExpandedSurroundings(q=q_all, keys=keys, values=values):
                q, k, v = q_all[tokens], keys[tokens], values[tokens]
        outs.append(attend_dense(q, k, v, shape.spec.scale))
    return torch.cat(outs)


def test_the_samples_reach_from_the_first_row_to_the_last() -> None:
    data = build_data(SHAPE_SETS["tiny"][1], CPU, 2)
    assert (data.samples[0].token, data.samples[-1].token) == (0, data.shape.num_tokens - 1)
    assert len(data.samples) == 8


def test_pages_lie_in_random_order() -> None:
    data = build_data(SHAPE_SETS["tiny"][0], CPU, 2)
    pages = [page for row in data.batch.rows for page in data.pool.table.owned(row)]
    assert sorted(pages) == list(range(1, len(pages) + 1))
    assert pages != sorted(pages)
