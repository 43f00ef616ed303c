"""The table of tiles: every query once, whatever the lengths, in as many tiles as rows and tokens allow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from sightline.kernels.triton.extend_tiles import (
    FIELDS,
    ExtendConfig,
    Tiles,
    choose_config,
    num_tiles,
    prepare_ragged_tiles,
    prepare_tiles,
)
from sightline.kernels.triton.numbers import WARP_GROUP_ROWS, warps_for
from support.extend_cases import DEVICE, empty_tiles


def random_lens(num_rows: int, longest: int, seed: int) -> list[int]:
    lens: list[int] = torch.randint(0, longest + 1, (num_rows,), generator=torch.Generator().manual_seed(seed)).tolist()
    return lens


def covered(tiles: Tiles, query_lens: Sequence[int]) -> list[tuple[int, int]]:
    """The (row, query) pairs of all tiles that are used."""
    pairs = []
    for row, first_query, _, query_len, _, _ in tiles.records.tolist():
        if row >= 0:
            assert query_len == query_lens[row]
            pairs += [(row, query) for query in range(first_query, min(first_query + tiles.tile_tokens, query_len))]
    return pairs


@pytest.mark.parametrize("tile_tokens", [1, 5, 32])
@pytest.mark.parametrize("query_lens", [[], [0], [7], [0, 0, 3, 0], [1] * 20, random_lens(300, 9, 1)])
def test_every_query_is_in_one_tile(query_lens: list[int], tile_tokens: int) -> None:
    num_rows, num_tokens = len(query_lens), sum(query_lens) + 2
    tiles = empty_tiles(num_rows, num_tokens, tile_tokens)
    lens = torch.tensor(query_lens, dtype=torch.int64, device=DEVICE)
    offsets = torch.full((num_rows + 1,), 99, device=DEVICE)
    prepare_tiles(lens, lens + 100, torch.arange(num_rows, device=DEVICE) + 4, num_tokens, offsets, tiles)
    wanted = [(row, query) for row, query_len in enumerate(query_lens) for query in range(query_len)]
    assert sorted(covered(tiles, query_lens)) == wanted
    starts = [0, *itertools.accumulate(query_lens)]
    if tiles.records.shape[0] > 0:
        assert offsets.tolist() == starts
    for row, _, first_token, query_len, num_keys, first_key in tiles.records.tolist():
        if row >= 0:
            assert (first_token, num_keys, first_key) == (starts[row], 2 * query_len + 100, row + 4)


def test_a_rows_last_queries_come_first() -> None:
    tiles = empty_tiles(2, 20, 4)
    lens, offsets = torch.tensor([10, 9], device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    prepare_tiles(lens, None, None, 20, offsets, tiles)
    used = [record[:3] for record in tiles.records.tolist() if record[0] >= 0]
    assert used == [[0, 8, 0], [0, 4, 0], [0, 0, 0], [1, 8, 10], [1, 4, 10], [1, 0, 10]]
    assert [record[5] for record in tiles.records.tolist() if record[0] >= 0] == [0, 0, 0, 10, 10, 10]


def test_ragged_tiles_know_both_offsets() -> None:
    tiles = empty_tiles(3, 5, 2)
    query_offsets, key_offsets = (torch.tensor(each, device=DEVICE) for each in ([0, 2, 2, 5], [0, 9, 12, 13]))
    prepare_ragged_tiles(query_offsets, key_offsets, 5, tiles)
    used = [record for record in tiles.records.tolist() if record[0] >= 0]
    assert used == [[0, 0, 0, 2, 9, 0], [2, 2, 2, 3, 1, 12], [2, 0, 2, 3, 1, 12]]


def test_too_few_tiles_are_refused() -> None:
    tiles = Tiles(torch.zeros(num_tiles(2, 20, 4) - 1, FIELDS, dtype=torch.int32, device=DEVICE), 4)
    lens, offsets = torch.tensor([10, 9], device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="expected at least 7 tiles for 2 rows and 20 tokens, got 6"):
        prepare_tiles(lens, None, None, 20, offsets, tiles)
    with pytest.raises(ValueError, match="together"):
        prepare_tiles(lens, lens, None, 20, offsets, tiles)
    with pytest.raises(ValueError, match="int32"):
        Tiles(torch.zeros(3, FIELDS), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [(16, 16), (80, 80), (128, 128), (192, 128), (256, 256), (512, 512)])
@pytest.mark.parametrize(("group_size", "longest"), [(1, 1), (3, 5), (8, 8192), (300, 2)])
@pytest.mark.parametrize("shared_bytes", [99 << 10, 163 << 10, 227 << 10])
def test_configurations_fit_the_kernel_and_the_device(
    dtype: torch.dtype, dims: tuple[int, int], group_size: int, longest: int, shared_bytes: int
) -> None:
    config = choose_config(dtype, *dims, group_size, longest, shared_bytes=shared_bytes)
    for size in (config.block_m, config.block_n):
        assert size >= 16
        assert size & (size - 1) == 0
    assert config.tile_tokens(group_size) * config.tile_heads(group_size) <= config.block_m
    staged = config.num_stages * config.block_n * (dims[0] + dims[1]) + config.block_m * dims[0]
    assert staged * dtype.itemsize <= shared_bytes


def test_tiles_hold_whole_groups_where_they_fit() -> None:
    config = ExtendConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)
    assert [config.tile_tokens(group) for group in (1, 3, 64, 100)] == [64, 21, 1, 1]
    assert [config.tile_heads(group) for group in (1, 3, 64, 100)] == [1, 3, 64, 64]


@pytest.mark.parametrize(("qk_dim", "v_dim"), [(28, 14), (56, 26), (192, 120), (40, 64)])
def test_heads_off_the_borders_of_16_get_no_warp_group(qk_dim: int, v_dim: int) -> None:
    config = choose_config(torch.bfloat16, qk_dim, v_dim, 1, 500, shared_bytes=1 << 17)
    assert config.block_m < WARP_GROUP_ROWS


def test_what_does_not_begin_on_borders_is_loaded_by_no_warp_group() -> None:
    whole = torch.zeros(4, 32, 64)
    assert warps_for(8, 64, whole, whole.mT, whole[..., 16:32]) == 8
    assert warps_for(8, 64, whole[..., :40]) == 2
    assert warps_for(8, 64, whole, whole[..., 1:]) == 2
    assert warps_for(8, 64, torch.zeros(4, 3, 60)) == 2
    assert warps_for(8, 32, torch.zeros(4, 3, 60)) == 8
