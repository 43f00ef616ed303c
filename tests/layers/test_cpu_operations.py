"""Each operation as a compiled kernel writes what its torch twin gives in fp32, and nothing beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("numba")

from sightline.kernels.cpu.program import CpuLauncher
from sightline.kernels.cpu.team import Team
from sightline.layers.activation import Activation, Gate
from sightline.layers.cpu_operations import CpuOperations, rounded
from sightline.layers.norm import RmsNorm
from support.cpu_launchers import CheckedLauncher
from support.layers import TORCH
from support.operation_cases import GATES, Check, OperationCases, Run, StateOperationCases, compare

TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[1, 3], ids=["one thread", "three threads"])
def launcher(request: pytest.FixtureRequest) -> Iterator[CpuLauncher]:
    team = Team(request.param)
    yield CheckedLauncher(team)
    team.close()


@pytest.fixture
def check(launcher: CpuLauncher) -> Check:
    def against_torch(run: Run, dtype: torch.dtype, rows: int) -> None:
        compare(run, CpuOperations(launcher, dtype), dtype, TOLERANCES[dtype], CPU)

    return against_torch


class TestCpuOperations(OperationCases):
    pass


class TestCpuStateOperations(StateOperationCases):
    pass


@pytest.fixture
def operations(launcher: CpuLauncher) -> CpuOperations:
    return CpuOperations(launcher, torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_logits_are_widened_exactly(launcher: CpuLauncher, dtype: torch.dtype, rows: int) -> None:
    wide = torch.randn(rows, 40).to(dtype)
    got = CpuOperations(launcher, dtype).widened(wide[:, 3:36])
    assert got.dtype == torch.float32
    assert torch.equal(got, wide[:, 3:36].float())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_rows_are_copied_exactly(launcher: CpuLauncher, dtype: torch.dtype, rows: int) -> None:
    wide = torch.randn(rows, 40).to(dtype)
    out = torch.zeros(rows, 50, dtype=dtype)
    CpuOperations(launcher, dtype).copy(wide[:, 3:36], out[:, 5:38])
    assert torch.equal(out[:, 5:38], wide[:, 3:36])
    assert not out[:, :5].any()
    assert not out[:, 38:].any()


def test_fp32_is_not_copied(operations: CpuOperations) -> None:
    x = torch.randn(3, 5)
    assert operations.widened(x) is x


def test_gelu_is_as_exact_as_fp32_allows(operations: CpuOperations) -> None:
    x = torch.linspace(-14.0, 14.0, 100_001)[None]
    got = x.clone()
    operations.activate(Activation.GELU, got)
    wanted = torch.nn.functional.gelu(x.double())
    assert bool(((got - wanted).abs() <= 3e-7 * x.abs()).all())


@pytest.mark.parametrize("kind", GATES, ids=str)
def test_a_compiled_gate_hides_no_nan(operations: CpuOperations, kind: Gate) -> None:
    gate, up = torch.zeros(2, 3, 4)
    gate[0, 1] = up[2, 3] = torch.nan
    out = torch.zeros(3, 4)
    operations.gate(kind, gate, up, out)
    assert out.isnan().nonzero().tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("kind", Activation)
def test_a_compiled_activation_hides_no_nan(operations: CpuOperations, kind: Activation) -> None:
    x = torch.tensor([[0.5, torch.nan, -100.0, 90.0, -1e30, 1e30]])
    wanted = x.clone()
    operations.activate(kind, x)
    TORCH.activate(kind, wanted)
    torch.testing.assert_close(x, wanted, equal_nan=True, atol=1e-6, rtol=1e-6)


def test_a_row_that_is_not_a_number_reaches_no_other_row(operations: CpuOperations) -> None:
    x, norm = torch.ones(3, 40), RmsNorm(torch.ones(40), 1e-6)
    x[1, 7] = torch.nan
    stream, out = torch.zeros_like(x), torch.zeros_like(x)
    operations.add_normed_then_norm(x, norm, stream, norm, out)
    for each in (stream, out):
        assert each.isnan().all(dim=1).tolist() == [False, True, False]
        assert each.isnan().any(dim=1).tolist() == [False, True, False]


def test_half_precision_does_not_overflow_in_a_norm(launcher: CpuLauncher) -> None:
    x, out = torch.full((1, 8), 60000.0, dtype=torch.float16), torch.empty(1, 8).half()
    CpuOperations(launcher, torch.float16).norm(x, RmsNorm(torch.ones(8), 1e-6), out)
    torch.testing.assert_close(out, torch.ones_like(out), atol=2.0**-10, rtol=0)


def test_buffers_of_another_dtype_or_order_are_refused(operations: CpuOperations) -> None:
    norm = RmsNorm(torch.ones(8), 1e-6)
    for x in (torch.ones(8, 3).t(), torch.ones(3, 8).bfloat16()):
        with pytest.raises(ValueError, match="expected row-major buffers"):
            operations.norm(x, norm, torch.empty(3, 8))
    for logits in (torch.ones(8, 3).t(), torch.ones(3, 8).bfloat16()):
        with pytest.raises(ValueError, match="expected row-major fp32"):
            operations.softcap(logits, 1.0)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("value", [1.0, 576**0.5, 48.0, 1 / 3, 1.00390625, 1.01171875, 0.1])
def test_a_scale_is_rounded_as_torch_rounds_it(dtype: torch.dtype, value: float) -> None:
    assert rounded(value, dtype) == float(torch.tensor(value, dtype=dtype))


LOGITS = [
    [0.0, 3.0, 3.0, -1.0],
    [-0.0, 0.0, -1.0, -0.0],
    [torch.nan, 1.0, torch.nan, torch.inf],
    [1.0, -torch.nan, 2.0, 0.0],
    [torch.inf, 1.0, torch.inf, 0.0],
    [-torch.inf, -2.0, -1.0, -3.0],
    [-torch.inf] * 4,
    [-5.0, -4.0, -4.0, -1e-40],
    [3.4e38, -3.4e38, 0.0, 3.4e38],
]


def test_the_likeliest_token_and_whether_its_logits_are_finite(operations: CpuOperations) -> None:
    logits = torch.tensor(LOGITS)
    out, wanted = torch.full((2, len(LOGITS)), -7), torch.full((2, len(LOGITS)), -7)
    operations.best_tokens(logits, out)
    TORCH.best_tokens(logits, wanted)
    assert out.tolist() == wanted.tolist()


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_the_likeliest_token_of_a_large_vocabulary(operations: CpuOperations, rows: int) -> None:
    wide = torch.randn(rows, 5003, generator=torch.Generator().manual_seed(3))
    logits = wide[:, 1:-1]
    out, wanted = torch.full((2, rows), -7), torch.full((2, rows), -7)
    operations.best_tokens(logits, out)
    TORCH.best_tokens(logits, wanted)
    assert out.tolist() == wanted.tolist()


def test_rows_that_a_table_does_not_have_are_nan_and_nothing_is_read(operations: CpuOperations) -> None:
    table, rows = torch.ones(5, 8), torch.tensor([4, 5, -1, 1 << 60, 0])
    vectors, sums = torch.zeros(2, 5, 8)
    operations.embed(table, rows, 2.0, vectors)
    operations.add_rows(table, rows, sums)
    for found, wanted in ((vectors, 2.0), (sums, 1.0)):
        assert bool((found[[0, 4]] == wanted).all())
        assert bool(found[1:4].isnan().all())
