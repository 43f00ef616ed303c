"""Elementary functions as LLVM instructions, beside those of NumPy in double precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sightline.kernels.cpu.compiler import ENTRY, compile_kernel
from sightline.kernels.cpu.elementary import exp, tanh
from sightline.kernels.cpu.emitter import F32, I64, Emitter, Value, vector
from sightline.kernels.cpu.processor import Processor
from sightline.kernels.cpu.record import ENTRY_POINT

LANES = 8
Function = Any
"""A function of a builder and a value."""


def applied(function: Function, x: np.ndarray, folder: Path) -> np.ndarray:
    """The function of each of the numbers, of which there are whole vectors."""

    def write(module: Any) -> None:
        emitter = Emitter(module, ENTRY, 3)
        source, target, count = (emitter.load(emitter.arguments[0], I64, 8 * i, align=8) for i in range(3))
        with emitter.loop(0, count, LANES) as first:
            place = emitter.times(first, 4)
            loaded = emitter.load(emitter.add(source, place), vector(F32, LANES), align=4)
            emitter.store(function(emitter.build, loaded), emitter.add(target, place), align=4)
        emitter.finish()

    assert x.size % LANES == 0
    out = np.full_like(x, np.nan)
    kernel = compile_kernel("elementary", (function.__name__,), write, Processor.detect(), folder)
    arguments = np.array([x.ctypes.data, out.ctypes.data, x.size], dtype=np.int64)
    ENTRY_POINT(kernel.address)(arguments.ctypes.data, 0, 1)
    return out


def without_overflow(build: Any, x: Value) -> Value:
    return exp(build, x, may_overflow=False)


def numbers(low: float, high: float) -> np.ndarray:
    return np.random.default_rng(0).uniform(low, high, 1 << 20).astype(np.float32)


@pytest.mark.parametrize(("function", "high"), [(exp, 87.9), (without_overflow, 1.0)])
def test_exp_is_within_2_units_in_the_last_place(function: Function, high: float, tmp_path: Path) -> None:
    x = numbers(-87.3, high)
    expected = np.exp(x.astype(np.float64))
    difference = np.abs(applied(function, x, tmp_path).astype(np.float64) - expected)
    assert np.max(difference / np.spacing(expected.astype(np.float32))) < 2


def test_exp_of_special_numbers(tmp_path: Path) -> None:
    x = np.array([0.0, -0.0, -87.75, -1e30, -np.inf, 88.1, np.inf, np.nan], dtype=np.float32)
    expected = np.array([1.0, 1.0, 0.0, 0.0, 0.0, np.inf, np.inf, np.nan], dtype=np.float32)
    np.testing.assert_array_equal(applied(exp, x, tmp_path), expected)
    np.testing.assert_array_equal(
        applied(without_overflow, x, tmp_path)[[0, 1, 2, 3, 4, 7]], expected[[0, 1, 2, 3, 4, 7]]
    )


def test_tanh_is_close_for_small_and_large_numbers(tmp_path: Path) -> None:
    for x in (numbers(-12.0, 12.0), numbers(-0.2, 0.2), numbers(-1e-3, 1e-3)):
        expected = np.tanh(x.astype(np.float64))
        difference = np.abs(applied(tanh, x, tmp_path) - expected)
        assert np.max(difference / np.maximum(np.abs(expected), 1e-30)) < 3e-6
    special = np.array([0.0, np.inf, -np.inf, np.nan, 100.0, -100.0, 30.0, -30.0], dtype=np.float32)
    np.testing.assert_array_equal(applied(tanh, special, tmp_path), np.tanh(special))
