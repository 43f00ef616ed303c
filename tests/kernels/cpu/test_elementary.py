"""Elementary functions as LLVM instructions, beside those of NumPy in double precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sightline.kernels.cpu.compiler import ENTRY, compile_kernel
from sightline.kernels.cpu.elementary import exp, power_of_two, tanh
from sightline.kernels.cpu.emitter import F32, I64, Emitter, vector
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


def numbers(low: float, high: float) -> np.ndarray:
    return np.random.default_rng(0).uniform(low, high, 1 << 20).astype(np.float32)


def test_exp_is_within_2_units_in_the_last_place(tmp_path: Path) -> None:
    x = numbers(-87.3, 87.9)
    expected = np.exp(x.astype(np.float64))
    difference = np.abs(applied(exp, x, tmp_path).astype(np.float64) - expected)
    assert np.max(difference / np.spacing(expected.astype(np.float32))) < 2


def test_exp_of_special_numbers(tmp_path: Path) -> None:
    x = np.array([0.0, -0.0, -87.75, -1e30, -np.inf, 88.1, np.inf, np.nan], dtype=np.float32)
    expected = np.array([1.0, 1.0, 0.0, 0.0, 0.0, np.inf, np.inf, np.nan], dtype=np.float32)
    np.testing.assert_array_equal(applied(exp, x, tmp_path), expected)


def test_tanh_is_close_for_small_and_large_numbers(tmp_path: Path) -> None:
    for x in (numbers(-12.0, 12.0), numbers(-0.2, 0.2), numbers(-1e-3, 1e-3)):
        expected = np.tanh(x.astype(np.float64))
        difference = np.abs(applied(tanh, x, tmp_path) - expected)
        assert np.max(difference / np.maximum(np.abs(expected), 1e-30)) < 3e-6
    special = np.array([0.0, np.inf, -np.inf, np.nan, 100.0, -100.0, 30.0, -30.0], dtype=np.float32)
    np.testing.assert_array_equal(applied(tanh, special, tmp_path), np.tanh(special))


def test_a_power_of_two_is_within_2_units_in_the_last_place(tmp_path: Path) -> None:
    x = numbers(-126.0, 0.0)
    expected = np.exp2(x.astype(np.float64))
    difference = np.abs(applied(power_of_two, x, tmp_path).astype(np.float64) - expected)
    assert np.max(difference / np.spacing(expected.astype(np.float32))) < 2


def test_whole_powers_of_two_are_exact(tmp_path: Path) -> None:
    x = -np.arange(0.0, 120.0, dtype=np.float32)
    np.testing.assert_array_equal(applied(power_of_two, x, tmp_path), np.exp2(x))


def test_powers_vanish_below_the_normal_numbers_and_nan_stays(tmp_path: Path) -> None:
    # The payload of this NaN has its lowest bit set.
    nan = np.array([0x7FC00001], dtype=np.int32).view(np.float32)
    x = np.concatenate([np.array([-np.inf, -1e30, -126.5, -127.0, -126.0, 0.0, -0.0], dtype=np.float32), nan])
    expected = np.array([0.0, 0.0, 0.0, 0.0, 2.0**-126, 1.0, 1.0, np.nan], dtype=np.float32)
    np.testing.assert_array_equal(applied(power_of_two, x, tmp_path), expected)
