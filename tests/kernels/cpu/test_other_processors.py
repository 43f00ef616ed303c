"""Kernels for processors that this machine is not: results, from an emulator or with one instruction spelled out."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sightline.kernels.coded_weights import CodeForm
from sightline.kernels.cpu import block_kernel, lookup_kernel
from sightline.kernels.cpu.block_kernel import ProductArguments, write_product
from sightline.kernels.cpu.compiler import machine_code, module_text
from sightline.kernels.cpu.emitter import I32, Emitter, Value, vector
from sightline.kernels.cpu.input_blocks import QuantiseArguments, input_bytes, write_quantise
from sightline.kernels.cpu.panels import pack
from sightline.kernels.cpu.processor import Instructions, Processor
from sightline.kernels.cpu.vector_unit import UNITS, Vnni512Unit, VnniUnit
from sightline.layers import cpu_compute
from sightline.layers.cpu_compute import CpuCompute
from sightline.layers.cpu_embedding import CodedEmbedding
from sightline.layers.cpu_linear import CodedLinear
from sightline.layers.torch_operations import TorchOperations
from support.coded_weights import FORMS, defined_product, random_coded
from support.cpu_launchers import SerialLauncher

ROWS, OUTPUTS, INPUTS = 71, 37, 512
CLOSE = 2e-6
all_forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


def spelled_out(emitter: Emitter, sums: Value, codes: Value, inputs: Value) -> Value:
    """What `vpdpbusd` is documented to compute."""
    build, lanes = emitter.build, sums.type.count
    wide = vector(I32, 4 * lanes)
    products = build.mul(build.zext(codes, wide), build.sext(inputs, wide))
    for place in range(4):
        sums = build.add(sums, emitter.shuffle(products, [4 * lane + place for lane in range(lanes)]))
    return sums


class SpelledVnni(VnniUnit):
    def sum_unsigned(self, emitter: Emitter, sums: Value, codes: Value, inputs: Value) -> Value:
        return spelled_out(emitter, sums, codes, inputs)


class SpelledVnni512(Vnni512Unit):
    def sum_unsigned(self, emitter: Emitter, sums: Value, codes: Value, inputs: Value) -> Value:
        return spelled_out(emitter, sums, codes, inputs)


SPELLED = {Instructions.AVX_VNNI: SpelledVnni(), Instructions.AVX512_VNNI: SpelledVnni512()}


@pytest.mark.parametrize("instructions", SPELLED, ids=lambda each: each.value)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("Q8_0", "Q4_K") else pytest.mark.prove) for name in FORMS]
)
def test_products_and_look_ups_with_the_panels_of_vnni(
    name: str, instructions: Instructions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (block_kernel, lookup_kernel, cpu_compute):
        monkeypatch.setattr(module, "UNITS", {**UNITS, **SPELLED})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    this = Processor.detect()
    # Another name than the real one, whose kernels may be compiled already.
    processor = Processor(this.triple, "generic", this.features, instructions)
    weights, compute = random_coded(FORMS[name], OUTPUTS, INPUTS), CpuCompute.on(SerialLauncher(3), processor)
    matrices = compute.pack([weights])
    for rows in (1, 3, ROWS):
        x, out = torch.randn(rows, INPUTS) + 0.5, torch.full((rows, OUTPUTS), float("nan"))
        CodedLinear(matrices, None, compute)(x, out)
        expected = defined_product(weights, x)
        assert float((out - expected).abs().max() / expected.abs().max()) < CLOSE
    tokens, vectors = torch.tensor([0, 36, 15, 16]), torch.empty(4, INPUTS)
    CodedEmbedding(matrices[0], compute)(tokens, 1.0, vectors, TorchOperations())
    assert torch.equal(vectors, weights.dequantised()[tokens])


EMULATOR, COMPILER = "qemu-x86_64-static", "x86_64-linux-gnu-gcc"
X86 = "x86_64-unknown-linux-gnu"
TARGETS = {
    "avx2": Processor(X86, "haswell", "", Instructions.AVX2),
    "portable": Processor(X86, "x86-64", "", Instructions.PORTABLE),
}
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


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which(EMULATOR) and shutil.which(COMPILER)), reason="needs an emulator of x86_64")
@pytest.mark.parametrize("processor", TARGETS.values(), ids=TARGETS.keys())
@all_forms
def test_products_in_an_emulator(form: CodeForm, processor: Processor, tmp_path: Path) -> None:
    writers: dict[str, Callable[[Any], None]] = {
        "quantise": lambda module: write_quantise(module, torch.float32),
        "product": lambda module: write_product(module, form, torch.float32, processor),
    }
    for name, write in writers.items():
        text = module_text(write, processor).replace('@"kernel"', f'@"{name}"')
        (tmp_path / f"{name}.o").write_bytes(machine_code(text, processor))
    (tmp_path / "main.c").write_text(MAIN)
    build = [COMPILER, "-static", "-o", "run", "main.c", "quantise.o", "product.o"]
    subprocess.run(build, cwd=tmp_path, check=True)
    weights, x = random_coded(form, OUTPUTS, INPUTS), torch.randn(ROWS, INPUTS) + 0.5
    matrix = pack(weights, UNITS[processor.instructions].panel)
    (tmp_path / "weights").write_bytes(matrix.panels.numpy().tobytes())
    (tmp_path / "inputs").write_bytes(x.numpy().tobytes())
    sizes = (ROWS, OUTPUTS, INPUTS, matrix.spans, input_bytes(INPUTS), matrix.panels.nbytes)
    subprocess.run([EMULATOR, "-cpu", "max", "./run", *map(str, sizes)], cwd=tmp_path, check=True)
    out = torch.from_numpy(np.fromfile(tmp_path / "outputs", dtype=np.float32)).view(ROWS, OUTPUTS)
    expected = defined_product(weights, x)
    assert float((out - expected).abs().max() / expected.abs().max()) < CLOSE
