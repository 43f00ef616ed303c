"""The processor that kernels are compiled for, and the vector instructions that they may use.

    Processor ──compiles──▶ machine code
        └── instructions: the best row of `ROWS` whose features the processor has, otherwise PORTABLE

A processor is a value, so that code for another architecture can be generated and inspected on any machine.
Does not know kernels.
"""

from __future__ import annotations

import platform
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm


class Instructions(Enum):
    """The instructions by which products of small integers are summed."""

    PORTABLE = "portable"
    """Vector operations that LLVM has for every processor."""
    NEON_DOT = "neon-dotprod"
    """aarch64 with sums of four products (`sdot`)."""
    NEON_MATRIX = "neon-i8mm"
    """aarch64 with products of 2 x 8 by 8 x 2 matrices (`smmla`), and `sdot` for single rows."""
    AVX2 = "avx2"
    """x86_64 with sums of two products (`vpmaddubsw`)."""
    AVX_VNNI = "avx-vnni"
    """x86_64 with sums of four products (`vpdpbusd`) of 256 bits, without AVX-512."""
    AVX512_VNNI = "avx512-vnni"
    """x86_64 with sums of four products of 512 bits."""


@dataclass(frozen=True)
class InstructionRow:
    """The features, in LLVM's names, that a processor must have for some instructions."""

    instructions: Instructions
    architecture: str
    needs: frozenset[str]


ROWS = (
    InstructionRow(
        Instructions.AVX512_VNNI,
        "x86_64",
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx2", "fma", "f16c"}),
    ),
    InstructionRow(Instructions.AVX_VNNI, "x86_64", frozenset({"avxvnni", "avx2", "fma", "f16c"})),
    InstructionRow(Instructions.AVX2, "x86_64", frozenset({"avx2", "fma", "f16c"})),
    InstructionRow(Instructions.NEON_MATRIX, "aarch64", frozenset({"neon", "dotprod", "i8mm"})),
    InstructionRow(Instructions.NEON_DOT, "aarch64", frozenset({"neon", "dotprod"})),
)
"""The sets of instructions, in order of preference."""

_LINUX_NAMES = {"asimd": "neon", "asimddp": "dotprod", "asimdhp": "fullfp16", "i8mm": "i8mm", "bf16": "bf16"}
"""Features of aarch64 in /proc/cpuinfo, which LLVM does not detect, and LLVM's names for them."""


@dataclass(frozen=True)
class Processor:
    """A target of compilation."""

    triple: str
    """LLVM's name of the platform, for example "aarch64-unknown-linux-gnu"."""
    name: str
    """LLVM's name of the processor, for example "neoverse-n1"; "generic" compiles for any."""
    features: str
    """The features beyond those of the name, as LLVM takes them: "+neon,+dotprod"."""
    instructions: Instructions

    @classmethod
    @cache
    def detect(cls) -> Processor:
        """The processor of this machine."""
        architecture = platform.machine().lower().replace("arm64", "aarch64").replace("amd64", "x86_64")
        found = llvm.get_host_cpu_features()
        extra = linux_features(Path("/proc/cpuinfo")) if architecture == "aarch64" else frozenset()
        present = {name for name, has in found.items() if has} | extra
        flags = found.flatten().split(",") if found else []
        return cls(
            llvm.get_process_triple(),
            llvm.get_host_cpu_name(),
            ",".join([*flags, *(f"+{name}" for name in sorted(extra))]),
            best_instructions(architecture, present),
        )

    @property
    def has_instructions(self) -> bool:
        """True if the processor satisfies a row of `ROWS`."""
        return self.instructions is not Instructions.PORTABLE

    def portable(self) -> Processor:
        """The same processor with the portable form of every kernel."""
        return Processor(self.triple, self.name, self.features, Instructions.PORTABLE)


def best_instructions(architecture: str, features: Collection[str]) -> Instructions:
    """The first row of `ROWS` that the processor satisfies; the portable form if there is none."""
    for row in ROWS:
        if row.architecture == architecture and row.needs <= set(features):
            return row.instructions
    return Instructions.PORTABLE


def linux_features(cpuinfo: Path) -> frozenset[str]:
    """The features that all cores have, by LLVM's names. Empty if the file does not exist."""
    if not cpuinfo.is_file():
        return frozenset()
    lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("Features")]
    cores = [set(line.partition(":")[2].split()) for line in lines]
    shared = set.intersection(*cores) if cores else set()
    return frozenset(_LINUX_NAMES[name] for name in shared if name in _LINUX_NAMES)
