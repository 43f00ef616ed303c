"""Which instructions a processor gets, and that code for every one of them can be generated on any machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llvmlite import ir

from sightline.kernels.cpu import block_kernel
from sightline.kernels.cpu.block_kernel import write_product
from sightline.kernels.cpu.compiler import assembly, module_text
from sightline.kernels.cpu.dense_kernel import DenseTypes, write_dense
from sightline.kernels.cpu.input_blocks import write_quantise
from sightline.kernels.cpu.lookup_kernel import write_lookup
from sightline.kernels.cpu.panels import PanelLayout
from sightline.kernels.cpu.processor import ROWS, Instructions, Processor, best_instructions, linux_features
from sightline.kernels.cpu.vector_unit import UNITS
from support.case_marks import proofs
from support.coded_weights import FORMS

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
TARGETS = {
    "avx512-vnni": Processor(X86, "icelake-server", "", Instructions.AVX512_VNNI),
    "avx-vnni": Processor(X86, "alderlake", "", Instructions.AVX_VNNI),
    "avx2": Processor(X86, "haswell", "", Instructions.AVX2),
    "neon": Processor(ARM, "generic", "+neon,+dotprod", Instructions.NEON_DOT),
    "neon-i8mm": Processor(ARM, "generic", "+neon,+dotprod,+i8mm", Instructions.NEON_MATRIX),
    "x86": Processor(X86, "x86-64", "", Instructions.PORTABLE),
    "arm": Processor(ARM, "generic", "", Instructions.PORTABLE),
}
TELLING = {
    "avx512-vnni": ("vpdpbusd", "%zmm"),
    "avx-vnni": ("vpdpbusd", "%ymm"),
    "avx2": ("vpmaddubsw", "%ymm"),
    "neon": ("sdot", ".4b["),
    "neon-i8mm": ("smmla", ".16b"),
}
"""The instruction of products, and a mark of its operands."""


@pytest.mark.parametrize("target", TELLING)
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", pytest.param("Q6_K", marks=pytest.mark.prove)])
def test_products_use_the_instruction_that_sums_them(target: str, name: str) -> None:
    processor, (instruction, operand) = TARGETS[target], TELLING[target]
    text = module_text(lambda module: write_product(module, FORMS[name], torch.float32, processor), processor)
    lines = [line for line in assembly(text, processor).splitlines() if f"\t{instruction}\t" in line]
    assert len(lines) >= 8 * sum(UNITS[processor.instructions].tile_rows)
    assert all(operand in line for line in lines)


@pytest.mark.prove
@pytest.mark.parametrize("processor", TARGETS.values(), ids=TARGETS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, *proofs(torch.bfloat16)])
def test_every_kernel_compiles_for_every_processor_and_calls_nothing(processor: Processor, dtype: torch.dtype) -> None:
    """A call of a function that is not in the module would fail when the code is loaded."""
    writers = (
        lambda module: write_quantise(module, dtype, processor),
        lambda module: write_product(module, FORMS["Q4_1"], dtype, processor),
        lambda module: write_lookup(module, FORMS["Q5_K"], dtype, processor),
        lambda module: write_dense(module, DenseTypes(dtype, dtype, dtype), processor, many_rows=False),
        lambda module: write_dense(module, DenseTypes(dtype, dtype, dtype), processor, many_rows=True),
    )
    for write in writers:
        listing = assembly(module_text(write, processor), processor)
        called = [line.split()[-1] for line in listing.splitlines() if line.split()[:1] in (["callq"], ["bl"])]
        inside = {line[:-1] for line in listing.splitlines() if line.endswith(":")}
        assert set(called) <= inside, (write, set(called) - inside)


def test_a_processor_gets_the_first_row_that_it_satisfies() -> None:
    everything = set[str]().union(*(row.needs for row in ROWS))
    assert best_instructions("x86_64", everything) is Instructions.AVX512_VNNI
    assert best_instructions("x86_64", everything - {"avx512vnni"}) is Instructions.AVX_VNNI
    assert best_instructions("x86_64", everything - {"avx512vnni", "avxvnni"}) is Instructions.AVX2
    assert best_instructions("x86_64", {"sse2"}) is Instructions.PORTABLE
    assert best_instructions("aarch64", everything) is Instructions.NEON_MATRIX
    assert best_instructions("aarch64", everything - {"i8mm"}) is Instructions.NEON_DOT
    assert best_instructions("aarch64", {"neon"}) is Instructions.PORTABLE
    assert best_instructions("riscv64", everything) is Instructions.PORTABLE


def test_linux_tells_features_that_all_cores_have(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    assert linux_features(file) == frozenset()
    file.write_text("processor : 0\nFeatures : fp asimd asimddp i8mm\n\nprocessor : 1\nFeatures : fp asimd asimddp\n")
    assert linux_features(file) == {"neon", "dotprod"}
    file.write_text("processor : 0\nFeatures : fp asimd asimddp i8mm\n")
    assert linux_features(file) == {"neon", "dotprod", "i8mm"}


@pytest.mark.parametrize(("rows", "smmla", "sdot"), [(1, 0, 16), (2, 16, 0), (3, 16, 16), (4, 32, 0)])
def test_pairs_of_rows_are_products_of_matrices_and_a_single_row_sums_four_products(
    rows: int, smmla: int, sdot: int
) -> None:
    """A row has 256 products with a block of 8 outputs: `smmla` sums 32 products, `sdot` 16."""
    processor = TARGETS["neon-i8mm"]
    unit, module = UNITS[processor.instructions], ir.Module("tile")
    layout = PanelLayout(FORMS["Q8_0"], unit.panel, unit.quads_together)
    block_kernel._write_packed_tile(module, layout, unit, rows).linkage = "external"
    listing = assembly(str(module), processor)
    assert [listing.count(f"\t{each}\t") for each in ("smmla", "sdot")] == [smmla, sdot]


def test_every_set_of_instructions_has_a_unit() -> None:
    assert set(UNITS) == set(Instructions)
    assert {row.instructions for row in ROWS} == set(Instructions) - {Instructions.PORTABLE}
    for unit in UNITS.values():
        assert unit.panel % unit.lanes == 0
        assert unit.tile_rows[-1] == 1
