"""Entries in host memory behind a buffer of hot ones: what attention reads is what it reads from the device alone."""

from __future__ import annotations

import pytest
import torch

from support.hot_benches import MAX_LEN, ORACLES, OURS, TOP_K, HotBench, hot, little_traffic, traffic


def assert_same(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]], tolerance: float) -> None:
    """Compares outputs; what was chosen need not be known where everything that is seen is read."""
    for number, (step, right) in enumerate(zip(found, expected, strict=True)):
        for tensor, wanted in zip(step[-2:], right[-2:], strict=True):
            assert torch.allclose(tensor, wanted, atol=tolerance, rtol=tolerance), f"step {number}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("buffer", [TOP_K, 2 * TOP_K, 3 * TOP_K + 1, 2 * MAX_LEN])
def test_outputs_are_those_of_entries_on_the_device(buffer: int, dtype: torch.dtype) -> None:
    expected = traffic(HotBench(OURS, dtype=dtype))
    found = traffic(HotBench(OURS, hot(buffer), dtype=dtype))
    # Tokens are computed in other turns, which round differently on some processors.
    assert_same(found, expected, 2e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "buffer",
    [
        pytest.param(TOP_K, marks=pytest.mark.prove),
        *[pytest.param(size, marks=pytest.mark.slow) for size in (2 * TOP_K, 50)],
    ],
)
def test_outputs_of_triton_kernels_are_those_of_torch(buffer: int) -> None:
    """On a CPU, Triton's interpreter runs them."""
    latent_backend = pytest.importorskip("sightline.attention.backends.triton.latent_backend")
    kernels = pytest.importorskip("sightline.kernels.triton.hot_entries")
    backends = (latent_backend.TritonLatentBackend, OURS[1])
    found = little_traffic(HotBench(backends, hot(buffer, kernels.fetch_entries)))
    assert_same(found, little_traffic(HotBench(OURS)), 2e-5)


def test_outputs_are_those_of_the_oracle() -> None:
    expected = traffic(HotBench(ORACLES))
    assert_same(traffic(HotBench(OURS, hot(TOP_K))), expected, 2e-5)
    assert_same(traffic(HotBench(ORACLES, hot(TOP_K))), expected, 0.0)
