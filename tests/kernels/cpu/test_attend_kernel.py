"""Attention over pages gives what the oracle gives, for contexts of several blocks and splits, on every processor."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from sightline.kernels.cpu.attend_kernel import write_attend, write_merge
from sightline.kernels.cpu.attend_tiles import AttendForm, pieces
from sightline.kernels.cpu.compiler import assembly, module_text
from sightline.kernels.cpu.processor import Instructions, Processor
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


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
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
@pytest.mark.parametrize("cache", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_code_for_other_processors_is_emitted(cache: torch.dtype, processor: Processor) -> None:
    form = AttendForm(torch.float32, cache, torch.float32, 5, 22, 22)
    listing = assembly(module_text(lambda module: write_attend(module, form, processor), processor), processor)
    merge = assembly(module_text(lambda module: write_merge(module, form), processor), processor)
    registers = {"avx2": "%ymm", "avx512": "%zmm", "portable": "%xmm"}
    wanted = next(registers[name] for name, other in OTHERS.items() if other == processor)
    assert wanted in listing
    assert "%xmm" in merge
