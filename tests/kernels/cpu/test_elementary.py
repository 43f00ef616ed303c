"""Elementary functions as instructions give what fp64 gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sightline.kernels.cpu.compiler import ENTRY, compile_kernel
from sightline.kernels.cpu.elementary import power_of_two
from sightline.kernels.cpu.emitter import I64, Emitter
from sightline.kernels.cpu.floats import load_floats
from sightline.kernels.cpu.processor import Processor
from sightline.kernels.cpu.record import Record
from support.cpu_launchers import SerialLauncher

WIDTH = 8


def write_powers(module: Any) -> None:
    """A kernel. Arguments: addresses of x and of the results, how many there are (a multiple of WIDTH)."""
    emitter = Emitter(module, ENTRY, 3)
    x, out, count = (emitter.load(emitter.arguments[0], I64, 8 * i, align=8) for i in range(3))
    with emitter.loop(0, count, WIDTH) as index:
        at = emitter.times(index, 4)
        loaded = load_floats(emitter, emitter.add(x, at), torch.float32, WIDTH)
        emitter.store(power_of_two(emitter.build, loaded), emitter.add(out, at), align=4)
    emitter.finish()


def powers(x: Tensor) -> Tensor:
    out, kernel = torch.full_like(x, torch.nan), compile_kernel("powers", (), write_powers, Processor.detect())
    arguments = np.array([x.data_ptr(), out.data_ptr(), len(x)], dtype=np.int64)
    SerialLauncher(1).launch(Record(kernel.address, arguments, (kernel, x, out), kernel.name))
    return out


def test_a_power_of_two_is_within_two_units_in_the_last_place() -> None:
    x = torch.linspace(-126.0, 0.0, 1 << 20)
    exact = torch.exp2(x.double())
    unit = torch.nextafter(exact.float(), torch.tensor(2.0)).double() - exact.float().double()
    assert float(((powers(x).double() - exact).abs() / unit).max()) < 2.0


def test_whole_powers_of_two_are_exact() -> None:
    x = -torch.arange(0.0, 120.0)
    assert torch.equal(powers(x), torch.exp2(x))


def test_powers_vanish_below_the_normal_numbers_and_nan_stays() -> None:
    # The payload of this NaN has its lowest bit set.
    nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    x = torch.cat([torch.tensor([-torch.inf, -1e30, -126.5, -127.0, -126.0, 0.0, -0.0]), nan])
    found = powers(x)
    assert found[:4].tolist() == [0.0] * 4
    assert found[4:7].tolist() == [2.0**-126, 1.0, 1.0]
    assert found[7].isnan()
