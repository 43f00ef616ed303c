"""Kernels for processors that this machine is not: results, from an emulator or with one instruction spelled out."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sightline.kernels.coded_weights import CodedWeights, CodeForm
from sightline.kernels.cpu.block_kernel import ProductArguments, write_product
from sightline.kernels.cpu.compiler import machine_code, module_text
from sightline.kernels.cpu.input_blocks import QuantiseArguments, input_bytes, write_quantise
from sightline.kernels.cpu.panels import pack
from sightline.kernels.cpu.processor import Instructions, Processor
from sightline.kernels.cpu.vector_unit import UNITS
from sightline.layers.cpu_compute import CpuCompute
from sightline.layers.cpu_embedding import CodedEmbedding
from sightline.layers.cpu_linear import CodedLinear
from sightline.layers.torch_operations import TorchOperations
from support.coded_weights import FORMS, defined_product, random_coded
from support.spelled_units import spelled_out

ROWS, OUTPUTS, INPUTS = 71, 37, 512
CLOSE = 2e-6
all_forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


@pytest.fixture
def spelled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Instructions], CpuCompute]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with spelled_out() as compute:
        yield compute


@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "instructions"),
    [
        *itertools.product(FORMS, (Instructions.AVX_VNNI, Instructions.NEON_MATRIX)),
        # The same products as with AVX-VNNI, in wider vectors.
        *itertools.product(("Q8_0", "Q4_K"), (Instructions.AVX512_VNNI,)),
    ],
)
def test_products_and_look_ups_with_the_panels_of_other_processors(
    name: str, instructions: Instructions, spelled: Callable[[Instructions], CpuCompute]
) -> None:
    weights, compute = random_coded(FORMS[name], OUTPUTS, INPUTS), spelled(instructions)
    matrices = compute.pack([weights])
    for rows in (1, 3, ROWS):
        x, out = torch.randn(rows, INPUTS) + 0.5, torch.full((rows, OUTPUTS), float("nan"))
        CodedLinear(matrices, None, compute)(x, out)
        expected = defined_product(weights, x)
        assert float((out - expected).abs().max() / expected.abs().max()) < CLOSE
    tokens, vectors = torch.tensor([0, 36, 15, 16]), torch.empty(4, INPUTS)
    CodedEmbedding(matrices[0], compute)(tokens, 1.0, vectors, TorchOperations())
    assert torch.equal(vectors, weights.dequantised()[tokens])


@pytest.mark.parametrize("name", ["Q8_0", pytest.param("Q6_K", marks=pytest.mark.prove)])
def test_products_of_matrices_equal_sums_of_four_products_bit_for_bit(
    name: str, spelled: Callable[[Instructions], CpuCompute]
) -> None:
    """Tiles of 1 to 4 rows of packed and of unpacked blocks, and a single row behind pairs."""
    weights, x = random_coded(FORMS[name], OUTPUTS, INPUTS), torch.randn(ROWS, INPUTS) + 0.5
    for rows in (1, 2, 3, 4, 5, ROWS):
        outs = []
        for instructions in (Instructions.NEON_DOT, Instructions.NEON_MATRIX):
            compute, out = spelled(instructions), torch.full((rows, OUTPUTS), float("nan"))
            CodedLinear(compute.pack([weights]), None, compute)(x[:rows], out)
            outs.append(out)
        assert torch.equal(*outs)


X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
X86_TARGETS = {
    "avx2": Processor(X86, "haswell", "", Instructions.AVX2),
    "portable": Processor(X86, "x86-64", "", Instructions.PORTABLE),
}
DOT = Processor(ARM, "generic", "+neon,+dotprod", Instructions.NEON_DOT)
MATRIX = Processor(ARM, "generic", "+neon,+dotprod,+i8mm", Instructions.NEON_MATRIX)
MAIN = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
void quantise(int64_t, int64_t, int64_t);
void product(int64_t, int64_t, int64_t);
static int64_t memory(const char *name, int64_t size) {
    char *place = aligned_alloc(64, (size + 127) / 64 * 64);
    memset(place, 255, size);
    FILE *file = fopen(name, "rb");
    if (file && fread(place, 1, size, file) != (size_t)size) exit(1);
    return (int64_t)place;
}
int main(int count, char **given) {
    int64_t n[32], threads = 3;
    for (int i = 1; i < count; i++) n[i] = atoll(given[i]);
    int64_t rows = n[1], outputs = n[2], inputs = n[3], spans = n[4], row_bytes = n[5], weight_bytes = n[6];
    int64_t w = memory("weights", weight_bytes), x = memory("inputs", rows * inputs * 4);
    int64_t room = memory("none", rows * row_bytes), out = memory("none", rows * outputs * 4);
    int64_t first[] = {x, inputs * 4, room, rows, inputs / 32};
    int64_t second[] = {w, room, row_bytes, out, outputs * 4, rows, outputs, spans, 64, 0, 0};
    for (int64_t thread = 0; thread < threads; thread++) quantise((int64_t)first, thread, threads);
    for (int64_t thread = 0; thread < threads; thread++) product((int64_t)second, thread, threads);
    FILE *file = fopen("outputs", "wb");
    fwrite((void *)out, 4, rows * outputs, file);
    return fclose(file);
}
"""
"""Runs both kernels of a product. The order of the arguments is that of the two tuples."""


def test_the_program_for_the_emulator_knows_the_arguments() -> None:
    assert QuantiseArguments._fields == ("inputs", "input_row_bytes", "blocks", "rows", "blocks_per_row")
    expected = "weights inputs input_row_bytes out out_row_bytes rows out_features spans chunk_rows bias accumulate"
    assert ProductArguments._fields == tuple(expected.split())


def needs_emulator(architecture: str) -> pytest.MarkDecorator:
    tools = (f"qemu-{architecture}-static", f"{architecture}-linux-gnu-gcc")
    return pytest.mark.skipif(not all(map(shutil.which, tools)), reason=f"needs an emulator of {architecture}")


class Emulated:
    """The kernels of a product with some weights, as a program for an emulator."""

    def __init__(self, folder: Path, processor: Processor, weights: CodedWeights) -> None:
        self._folder = folder
        self._architecture = processor.triple.partition("-")[0]
        unit = UNITS[processor.instructions]
        self._matrix = pack(weights, unit.panel, unit.quads_together)
        folder.mkdir()
        writers: dict[str, Callable[[Any], None]] = {
            "quantise": lambda module: write_quantise(module, torch.float32, processor),
            "product": lambda module: write_product(module, weights.form, torch.float32, processor),
        }
        for name, write in writers.items():
            text = module_text(write, processor).replace('@"kernel"', f'@"{name}"')
            (folder / f"{name}.o").write_bytes(machine_code(text, processor))
        (folder / "main.c").write_text(MAIN)
        (folder / "weights").write_bytes(self._matrix.panels.numpy().tobytes())
        compiler = f"{self._architecture}-linux-gnu-gcc"
        build = [compiler, "-static", "-o", "run", "main.c", "quantise.o", "product.o"]
        subprocess.run(build, cwd=folder, check=True)

    def __call__(self, x: Tensor) -> Tensor:
        matrix = self._matrix
        (self._folder / "inputs").write_bytes(x.numpy().tobytes())
        shape = (len(x), matrix.out_features, matrix.in_features)
        sizes = (*shape, matrix.spans, input_bytes(matrix.in_features), matrix.panels.nbytes)
        run = [f"qemu-{self._architecture}-static", "-cpu", "max", "./run", *map(str, sizes)]
        subprocess.run(run, cwd=self._folder, check=True)
        found = np.fromfile(self._folder / "outputs", dtype=np.float32)
        return torch.from_numpy(found).view(len(x), matrix.out_features)


@pytest.mark.slow
@needs_emulator("x86_64")
@pytest.mark.parametrize("processor", X86_TARGETS.values(), ids=X86_TARGETS.keys())
@all_forms
def test_products_in_an_emulator(form: CodeForm, processor: Processor, tmp_path: Path) -> None:
    weights, x = random_coded(form, OUTPUTS, INPUTS), torch.randn(ROWS, INPUTS) + 0.5
    out, expected = Emulated(tmp_path / "run", processor, weights)(x), defined_product(weights, x)
    assert float((out - expected).abs().max() / expected.abs().max()) < CLOSE


@pytest.mark.prove
@needs_emulator("aarch64")
@all_forms
def test_products_of_matrices_in_an_emulator(form: CodeForm, tmp_path: Path) -> None:
    """Equal to the definition, and bit for bit to those of `sdot`."""
    weights, x = random_coded(form, OUTPUTS, INPUTS), torch.randn(ROWS, INPUTS) + 0.5
    dot, matrix = Emulated(tmp_path / "dot", DOT, weights), Emulated(tmp_path / "matrix", MATRIX, weights)
    for rows in (1, 2, 3, ROWS):
        out, expected = matrix(x[:rows]), defined_product(weights, x[:rows])
        assert float((out - expected).abs().max() / expected.abs().max()) < CLOSE
        assert torch.equal(out, dot(x[:rows]))
