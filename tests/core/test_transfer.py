"""Numbers reach a device, and come back, as they are."""

from __future__ import annotations

import numpy
import torch

from sightline.core.lengths import moved
from sightline.core.transfer import Arrival, sent

CPU = torch.device("cpu")


def test_arrays_of_both_types_and_any_shape_arrive_as_they_are() -> None:
    arrays = [
        numpy.array([[1, -(2**63)], [2**63 - 1, 0]]),
        numpy.array([0.1, -0.0, numpy.nan, 5e-324]),
        numpy.zeros((3, 0)),
        numpy.arange(12).reshape(3, 4).T[::2],
    ]
    tensors = sent(arrays, CPU)
    assert [tensor.dtype for tensor in tensors] == [torch.int64, torch.float64, torch.float64, torch.int64]
    for array, tensor in zip(arrays, tensors, strict=True):
        numpy.testing.assert_array_equal(tensor.numpy(), array)


def test_lists_arrive_one_behind_the_other() -> None:
    first, empty, last = moved([[3, -1], (), range(4)], CPU)
    assert (first.tolist(), empty.tolist(), last.tolist()) == ([3, -1], [], [0, 1, 2, 3])
    assert last.data_ptr() == first.data_ptr() + first.nbytes
    assert [part.tolist() for part in moved([[]], CPU)] == [[]]


def test_what_comes_back_is_what_was_there() -> None:
    assert Arrival(torch.tensor([1.5, 2.0])).wait().tolist() == [1.5, 2.0]
