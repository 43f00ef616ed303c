"""A step's buffers are the same memory for every layer, in the order that products prefer, and no step allocates."""

from __future__ import annotations

import pytest
import torch

from sightline.attention.workspace import MAIN_LANE, Workspace
from sightline.layers.scratch import Activations, Scratch, empty_rows, prefers_feature_major
from support.layers import TORCH, activations


class Pair:
    """Two buffers."""

    def __init__(self, scratch: Scratch, first: int, second: int) -> None:
        self.first, self.second = scratch.take("pair", first), scratch.take_rows("pair", second)


def test_only_batches_of_decoding_rows_are_turned() -> None:
    assert [rows for rows in (0, 1, 7, 8, 16, 48, 49, 128) if prefers_feature_major(rows)] == [8, 16, 48]


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8, 48, 100])
def test_a_buffer_has_a_row_for_each_token_whatever_its_order(num_tokens: int) -> None:
    scratch = activations(100).shaped(num_tokens)
    taken, rows = scratch.take("a", 24), scratch.take_rows("b", 24)
    assert taken.shape == rows.shape == empty_rows(num_tokens, 24, taken, turns=True).shape == (num_tokens, 24)
    assert rows.is_contiguous()
    if num_tokens > 1:
        assert taken.is_contiguous() != prefers_feature_major(num_tokens)


def test_layers_that_ask_alike_share_buffers_and_others_do_not() -> None:
    scratch = activations(10).shaped(4)
    pair = scratch.of(Pair, 3, 5)
    assert scratch.of(Pair, 3, 5) is pair
    assert scratch.of(Pair, 3, 6) is not pair
    assert pair.first.data_ptr() != pair.second.data_ptr()


def test_steps_of_every_size_use_the_same_leases() -> None:
    workspace = Workspace(torch.device("cpu"), 1 << 20)
    memory = Activations(workspace, MAIN_LANE, 64, torch.float32, TORCH, turns=True)
    address = memory.shaped(64).of(Pair, 3, 5).first.data_ptr()
    before = workspace.ledger()
    for num_tokens in (1, 16, 17, 64, 1):
        assert memory.shaped(num_tokens).of(Pair, 3, 5).first.data_ptr() == address
    assert workspace.ledger() == before
    assert {entry.num_bytes for entry in before} == {64 * 3 * 4, 64 * 5 * 4}


def test_a_step_as_large_as_the_one_before_finds_its_buffers_made() -> None:
    memory = activations(64)
    assert memory.shaped(5).of(Pair, 3, 5) is memory.shaped(5).of(Pair, 3, 5)


def test_a_step_beyond_the_largest_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at most 8 tokens in a step, got 9"):
        activations(8).shaped(9)
