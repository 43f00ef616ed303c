"""A fingerprint changes with any element, and with the order of elements, and with nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sightline.attention.fingerprint import changed_parts, fingerprint_tensors


def of(tensor: Tensor) -> int:
    return fingerprint_tensors({"it": tensor})["it"]


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=40), data=st.data())
def test_one_changed_element_changes_the_fingerprint(values: list[int], data: st.DataObject) -> None:
    before = torch.tensor(values)
    after = before.clone()
    after[data.draw(st.integers(0, len(values) - 1))] += data.draw(st.integers(1, 2**33))
    assert of(before) != of(after)
    assert of(before) == of(before.clone())


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.integers(0, 5000), min_size=2, max_size=40), data=st.data())
def test_the_same_elements_in_another_order_have_another_fingerprint(values: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(values))
    assert (of(torch.tensor(values)) == of(torch.tensor(order))) == (values == order)


def test_what_one_element_gains_and_another_loses_does_not_cancel() -> None:
    base = torch.arange(64)
    seen = {of(base)}
    for place in range(63):
        moved = base.clone()
        moved[place] += 1
        moved[place + 1] -= 1
        seen.add(of(moved))
    assert len(seen) == 64


def test_lengths_of_zeros_differ() -> None:
    assert len({of(torch.zeros(size, dtype=torch.int64)) for size in range(50)}) == 50


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32]
)
def test_every_dtype_of_a_plan_buffer_has_a_fingerprint(dtype: torch.dtype) -> None:
    before = torch.zeros(5, dtype=dtype)
    after = before.clone()
    after[4] = 1
    assert of(before) != of(after)


def test_the_bits_count_and_not_the_values() -> None:
    assert of(torch.tensor([0.0])) != of(torch.tensor([-0.0]))
    assert of(torch.tensor([torch.nan])) == of(torch.tensor([torch.nan]))
    assert of(torch.tensor([-torch.inf, 0.0])) != of(torch.tensor([0.0, -torch.inf]))


def test_a_view_has_the_fingerprint_of_what_it_shows() -> None:
    wide = torch.arange(24).view(4, 6)
    assert of(wide[:, 2]) == of(torch.tensor([2, 8, 14, 20]))
    assert of(wide[:, 2]) != of(wide[:, 3])


def test_nothing_and_a_single_number_have_fingerprints() -> None:
    assert of(torch.zeros(0)) == of(torch.zeros(0, 7))
    assert of(torch.tensor(3)) == of(torch.tensor([3]))


def test_changed_parts_are_named_in_order() -> None:
    before = fingerprint_tensors({name: torch.tensor([index]) for index, name in enumerate("abcd")})
    after = fingerprint_tensors({name: torch.tensor([9 if name in "db" else "abcd".index(name)]) for name in "abcd"})
    assert changed_parts(before, after) == ("b", "d")
    assert changed_parts(before, before) == ()
