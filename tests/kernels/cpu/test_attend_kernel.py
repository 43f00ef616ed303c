"""Attention over pages gives what the oracle gives, for contexts of several blocks and splits, on every processor."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import Tensor

pytest.importorskip("numba")

from sightline.attention.backends.numba.calls import AttentionScratch, Pages
from sightline.kernels.cpu.attend_kernel import write_attend, write_merge
from sightline.kernels.cpu.attend_prompt import write_attend_prompt
from sightline.kernels.cpu.attend_tiles import AttendForm, pieces
from sightline.kernels.cpu.compiler import assembly, machine_code, module_text
from sightline.kernels.cpu.processor import Instructions, Processor
from sightline.kernels.cpu.record import Record
from support.case_marks import proofs
from support.cpu_attention import LONG, Heads, attended

CLOSE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
ODD, PLAIN = Heads(kv_heads=2, group=5, dim=22), Heads(kv_heads=3, group=3, dim=64)


@pytest.mark.parametrize("num_threads", [1, 7])
@pytest.mark.parametrize("heads", [ODD, PLAIN, Heads(4, 1, 64)], ids=str)
def test_contexts_of_several_blocks_and_splits(heads: Heads, num_threads: int) -> None:
    assert attended(heads, num_threads=num_threads).error() < CLOSE[torch.float32]


@pytest.mark.parametrize("contexts", [(700,), (1,), (3,) * 20], ids=str)
def test_one_row_and_many_rows(contexts: tuple[int, ...]) -> None:
    assert attended(ODD, contexts=contexts).error() < CLOSE[torch.float32]


@pytest.mark.parametrize("window", [1, 17, 64, 100])
def test_a_window_begins_anywhere(window: int) -> None:
    assert attended(ODD, window=window).error() < CLOSE[torch.float32]


def caches() -> list[ParameterSet]:
    """Every cache with every dtype: each of both once in every run."""
    routine = ((torch.bfloat16, torch.float32), (torch.float16, torch.float16), (torch.float8_e4m3fn, torch.bfloat16))
    return [
        pytest.param(cache, dtype, id=f"{cache}-{dtype}", marks=() if (cache, dtype) in routine else pytest.mark.prove)
        for cache in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
        for dtype in CLOSE
    ]


@pytest.mark.parametrize(("cache", "dtype"), caches())
def test_every_cache_with_every_dtype(cache: torch.dtype, dtype: torch.dtype) -> None:
    assert attended(PLAIN, cache, dtype).error() < CLOSE[dtype]
    assert attended(ODD, cache, dtype).error() < CLOSE[dtype]


@pytest.mark.parametrize("cache", [torch.float32, torch.float16, torch.float8_e4m3fn], ids=str)
def test_nan_in_a_value_is_nan_in_that_dimension_of_that_row_only(cache: torch.dtype) -> None:
    result = attended(PLAIN, cache, contexts=(130, 70), nan_at=(100, 37))
    expected = torch.zeros(2, 9, 64, dtype=torch.bool)
    expected[0, :, 37] = True
    assert torch.equal(result.out.isnan(), expected)


def test_the_number_of_threads_does_not_change_a_row_beside_others_beyond_rounding() -> None:
    many, few = attended(ODD, num_threads=13), attended(ODD, num_threads=1)
    assert (many.out - few.out).abs().max() < CLOSE[torch.float32]
    assert len(many.out) == len(LONG)


@pytest.mark.parametrize("size", range(1, 40))
@pytest.mark.parametrize("largest", [4, 16, 64])
def test_pieces_cover_every_dimension_once(size: int, largest: int) -> None:
    found = pieces(size, largest)
    covered = [dim for piece in found for dim in range(piece.first, piece.first + piece.size)]
    assert covered == list(range(size))
    assert all(piece.size <= largest and piece.size & (piece.size - 1) == 0 for piece in found)


X86 = "x86_64-unknown-linux-gnu"
OTHERS = {
    "avx2": Processor(X86, "haswell", "", Instructions.AVX2),
    "avx512": Processor(X86, "icelake-server", "", Instructions.AVX512_VNNI),
    "portable": Processor(X86, "x86-64", "", Instructions.PORTABLE),
}


@pytest.mark.parametrize("processor", OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize("cache", [torch.float32, *proofs(torch.float8_e4m3fn)], ids=str)
def test_code_for_other_processors_is_emitted(cache: torch.dtype, processor: Processor) -> None:
    form = AttendForm(torch.float32, cache, torch.float32, 5, 22, 22)
    listing = assembly(module_text(lambda module: write_attend(module, form, processor), processor), processor)
    merge = assembly(module_text(lambda module: write_merge(module, form), processor), processor)
    prompt = assembly(module_text(lambda module: write_attend_prompt(module, form, processor), processor), processor)
    registers = {"avx2": "%ymm", "avx512": "%zmm", "portable": "%xmm"}
    wanted = next(registers[name] for name, other in OTHERS.items() if other == processor)
    assert wanted in listing
    assert wanted in prompt
    assert "%xmm" in merge


EMULATOR, COMPILER = "qemu-x86_64-static", "x86_64-linux-gnu-gcc"
MAIN = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
void attend(int64_t, int64_t, int64_t);
void attend_prompt(int64_t, int64_t, int64_t);
void merge(int64_t, int64_t, int64_t);
float logf(float x) {
    int power = 0;
    double rest = x, term, square, total = 0;
    if (x <= 0) return -__builtin_inff();
    for (; rest > 1.5; rest /= 2) power++;
    for (; rest < 0.75; rest *= 2) power--;
    term = (rest - 1) / (rest + 1), square = term * term;
    for (int i = 1; i < 40; i += 2, term *= square) total += 2 * term / i;
    return total + power * 0.69314718055994531;
}
int main(int count, char **given) {
    int64_t size = atoll(given[2]), threads = atoll(given[3]), fields = count - 4, numbers[64];
    char *memory = aligned_alloc(64, size);
    FILE *file = fopen("memory", "rb");
    if (fread(memory, 1, size, file) != (size_t)size) return 1;
    fclose(file);
    for (int i = 0; i < fields; i++)
        numbers[i] = given[4 + i][0] == '@' ? (int64_t)memory + atoll(given[4 + i] + 1) : atoll(given[4 + i]);
    void (*kernel)(int64_t, int64_t, int64_t) = !strcmp(given[1], "merge") ? merge : attend;
    if (!strcmp(given[1], "attend_prompt")) kernel = attend_prompt;
    for (int64_t thread = 0; thread < threads; thread++) kernel((int64_t)numbers, thread, threads);
    file = fopen("memory", "wb");
    fwrite(memory, 1, size, file);
    return fclose(file);
}
"""
"""Runs a kernel on the bytes of a file, with a logarithm of its own. Arguments: kernel, bytes, threads, and the numbers
that the kernel reads, in which @ marks places in the bytes."""


class EmulatedLauncher:
    """Runs attention's records in an emulator: the tensors that they keep travel in a file."""

    num_threads = 7

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def launch(self, record: Record) -> None:
        q, keys, values, pages, scratch, _, out, lse, lens = record.keeps[1:]
        assert isinstance(pages, Pages)
        assert isinstance(scratch, AttentionScratch)
        kept = [q, keys, values, pages.table, scratch.located, scratch.parts, scratch.threads, out, lse]
        kept += [] if lens is None else [lens]
        places, memory = {}, b""
        for each in kept:
            assert isinstance(each, Tensor)
            places[each.data_ptr()] = f"@{len(memory)}"
            content = each.contiguous().view(torch.uint8).numpy().tobytes()
            memory += content + bytes(-len(content) % 64)
        numbers = [places.get(number, str(number)) for number in record.arguments.tolist()]
        (self._folder / "memory").write_bytes(memory)
        run = [EMULATOR, "-cpu", "max", "./run", record.name, str(len(memory)), str(self.num_threads), *numbers]
        subprocess.run(run, cwd=self._folder, check=True)
        memory = (self._folder / "memory").read_bytes()
        for each in kept:
            assert isinstance(each, Tensor)
            first = int(places[each.data_ptr()][1:])
            read = torch.frombuffer(bytearray(memory[first : first + each.nbytes]), dtype=torch.uint8)
            each.view(torch.uint8).copy_(read.view_as(each.view(torch.uint8)))


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which(EMULATOR) and shutil.which(COMPILER)), reason="needs an emulator of x86_64")
@pytest.mark.parametrize("name", ["avx2", "portable"])
@pytest.mark.parametrize("cache", [torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("heads", [ODD, PLAIN], ids=str)
def test_attention_in_an_emulator(heads: Heads, cache: torch.dtype, name: str, tmp_path: Path) -> None:
    form, processor = AttendForm(torch.float32, cache, torch.float32, *heads[1:], heads.dim), OTHERS[name]
    writers: dict[str, Callable[[Any], None]] = {
        "attend": lambda module: write_attend(module, form, processor),
        "attend_prompt": lambda module: write_attend_prompt(module, form, processor),
        "merge": lambda module: write_merge(module, form),
    }
    for kernel, write in writers.items():
        text = module_text(write, processor).replace('@"kernel"', f'@"{kernel}"')
        (tmp_path / f"{kernel}.o").write_bytes(machine_code(text, processor))
    (tmp_path / "main.c").write_text(MAIN)
    build = [COMPILER, "-static", "-o", "run", "main.c", *(f"{kernel}.o" for kernel in writers)]
    subprocess.run(build, cwd=tmp_path, check=True)
    launcher = EmulatedLauncher(tmp_path)
    assert attended(heads, cache, contexts=(1, 65, 200), launcher=launcher).error() < CLOSE[torch.float32]
    prompts = attended(heads, cache, contexts=(1, 65, 200), new_tokens=(1, 65, 30), launcher=launcher)
    assert prompts.error() < CLOSE[torch.float32]
