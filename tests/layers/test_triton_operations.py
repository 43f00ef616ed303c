"""Each operation is one launch that writes what its torch twin gives in fp32, and nothing beside it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime.jit import KernelInterface

from sightline.layers.activation import Activation, Gate
from sightline.layers.norm import RmsNorm
from sightline.layers.triton_operations import TritonOperations
from support.extend_cases import DEVICE
from support.operation_cases import GATES, Check, OperationCases, Run, StateOperationCases, compare

TRITON = TritonOperations()
# The interpreter cuts bf16 off where a device rounds.
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    counted, launch = SimpleNamespace(number=0), KernelInterface.__getitem__

    def count(self: object, grid: object) -> object:
        counted.number += 1
        return launch(self, grid)

    monkeypatch.setattr(KernelInterface, "__getitem__", count)
    return counted


@pytest.fixture
def check(launches: SimpleNamespace) -> Check:
    """Every operation is one launch, or none without rows."""

    def launched_once(run: Run, dtype: torch.dtype, rows: int) -> None:
        compare(run, TRITON, dtype, TOLERANCES[dtype], DEVICE)
        assert launches.number == (1 if rows else 0)

    return launched_once


class TestTritonOperations(OperationCases):
    pass


class TestTritonStateOperations(StateOperationCases):
    @pytest.fixture
    def check(self) -> Check:
        def against_torch(run: Run, dtype: torch.dtype, rows: int) -> None:
            compare(run, TRITON, dtype, TOLERANCES[dtype], DEVICE)

        return against_torch


def test_half_precision_does_not_overflow_on_the_way() -> None:
    x, out = torch.full((1, 8), 60000.0, dtype=torch.float16, device=DEVICE), torch.empty(1, 8, device=DEVICE).half()
    TRITON.norm(x, RmsNorm(torch.ones(8, device=DEVICE), 1e-6), out)
    torch.testing.assert_close(out, torch.ones_like(out), atol=2.0**-10, rtol=0)


@pytest.mark.parametrize("kind", GATES, ids=str)
def test_a_gate_hides_no_nan(kind: Gate) -> None:
    gate, up = torch.zeros(2, 3, 4, device=DEVICE)
    gate[0, 1] = up[2, 3] = torch.nan
    out = torch.zeros(3, 4, device=DEVICE)
    TRITON.gate(kind, gate, up, out)
    assert out.isnan().nonzero().tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("kind", Activation)
def test_an_activation_hides_no_nan(kind: Activation) -> None:
    x = torch.tensor([[0.5, torch.nan, -100.0]], device=DEVICE)
    TRITON.activate(kind, x)
    assert x.isnan().tolist() == [[False, True, False]]


def test_a_row_that_is_not_a_number_reaches_no_other() -> None:
    x, norm = torch.ones(3, 40, device=DEVICE), RmsNorm(torch.ones(40, device=DEVICE), 1e-6)
    x[1, 7] = torch.nan
    stream, out = torch.zeros_like(x), torch.zeros_like(x)
    TRITON.add_normed_then_norm(x, norm, stream, norm, out)
    for each in (stream, out):
        assert each.isnan().all(dim=1).tolist() == [False, True, False]
        assert each.isnan().any(dim=1).tolist() == [False, True, False]


def test_feature_major_buffers_are_not_read() -> None:
    x = torch.ones(8, 3, device=DEVICE).t()
    with pytest.raises(AssertionError, match="expected contiguous rows"):
        TRITON.norm(x, RmsNorm(torch.ones(8, device=DEVICE), 1e-6), torch.empty(3, 8, device=DEVICE))
