"""Times decode attention on a CPU against a plain read of memory by the same threads.

    python benchmarks/cpu_attention.py [--threads 2] [--contexts 512,4096,16384] [--dtypes float32,float16]

One row with one new token. Keys and values of several layers, together larger than the caches, take turns, so that they
come from memory. The table has GB of keys and values per second, and which part of the read rate that is. Cells are the
best of several runs, between which memory is read again: on a shared machine the rate changes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sightline.attention.backends.numba.calls import AttentionCalls, AttentionScratch, AttentionShape, Entries, Pages
from sightline.kernels.cpu.compiler import ENTRY, compile_kernel
from sightline.kernels.cpu.emitter import I64, Emitter, vector
from sightline.kernels.cpu.processor import Processor
from sightline.kernels.cpu.program import CpuLauncher
from sightline.kernels.cpu.record import Record
from sightline.kernels.cpu.team import Team

SHAPES = ((9, 3, 64), (32, 8, 128), (16, 16, 64))
"""Query heads, key heads, head dimension."""
PAGE = 16
FLUSH_BYTES = 160 << 20
"""More than the caches hold."""
SECONDS = 0.4


def write_read(module: Any) -> None:
    """A kernel that reads bytes. Arguments: their address, how many (a multiple of 64), and where to write a sum."""
    emitter = Emitter(module, ENTRY, 3)
    arguments, thread, num_threads = emitter.arguments
    memory, count, out = (emitter.load(arguments, I64, 8 * i, align=8) for i in range(3))
    first, stop = emitter.share(emitter.build.sdiv(count, emitter.number(64)), thread, num_threads)
    total = emitter.variable(vector(I64, 8))
    emitter.set(total, emitter.constant(vector(I64, 8), 0))
    with emitter.loop(first, stop) as line:
        loaded = emitter.load(emitter.add(memory, emitter.times(line, 64)), vector(I64, 8), align=8)
        emitter.set(total, emitter.build.add(emitter.get(total), loaded))
    emitter.store(emitter.get(total), emitter.add(out, emitter.times(thread, 64)), align=8)
    emitter.finish()


def plain_read(launcher: CpuLauncher) -> tuple[Callable[[], None], int]:
    """Reads memory once, and how many bytes that is."""
    memory = torch.ones(FLUSH_BYTES // 8, dtype=torch.int64)
    sums = torch.zeros(launcher.num_threads, 8, dtype=torch.int64)
    arguments = np.array([memory.data_ptr(), memory.nbytes, sums.data_ptr()], dtype=np.int64)
    kernel = compile_kernel("read", (), write_read, Processor.detect())
    record = Record(kernel.address, arguments, (kernel, memory, sums), kernel.name)
    return lambda: launcher.launch(record), memory.nbytes


def decode(
    launcher: CpuLauncher, heads: tuple[int, int, int], context: int, dtype: torch.dtype
) -> tuple[Callable[[], None], int]:
    """One token's attention in every layer, and how many bytes of keys and values it reads."""
    num_heads, num_kv_heads, dim = heads
    shape = AttentionShape(num_kv_heads, num_heads // num_kv_heads, dim, dim)
    query_dtype = dtype if dtype.itemsize > 1 else torch.float32
    calls = AttentionCalls(launcher, shape, query_dtype, dtype, query_dtype, query_dtype)
    scratch = AttentionScratch.of(lambda _, size, kind: torch.empty(size, dtype=kind), shape, 1, launcher.num_threads)
    scratch.located.zero_()
    scratch.located[0, 2] = context
    layer_bytes = 2 * context * num_kv_heads * dim * dtype.itemsize
    num_layers = max(2, FLUSH_BYTES // layer_bytes)

    def planes() -> list[Entries]:
        def plane() -> Tensor:
            return torch.randn(context, num_kv_heads, dim).to(dtype)

        return [Entries(plane(), 1.0) for _ in range(num_layers)]

    keys, values = planes(), planes()
    pages = Pages(torch.randperm(context // PAGE)[None].contiguous(), PAGE)
    q, out = torch.randn(1, num_heads, dim).to(query_dtype), torch.empty(1, num_heads, dim, dtype=query_dtype)
    with launcher.recording() as tape:
        for own_keys, own_values in zip(keys, values, strict=True):
            calls.attend(q, own_keys, own_values, pages, scratch, out, scale=dim**-0.5)
    program = tape.program()
    return lambda: launcher.run(program), num_layers * layer_bytes


def rates(work: list[tuple[Callable[[], None], int]]) -> list[float]:
    """The highest rate of each in GB/s. They take turns."""
    best = [0.0] * len(work)
    end, rounds = time.perf_counter() + SECONDS, 0
    while rounds < 3 or time.perf_counter() < end:
        for place, (run, num_bytes) in enumerate(work):
            start = time.perf_counter()
            run()
            best[place] = max(best[place], num_bytes / (time.perf_counter() - start) / 1e9)
        rounds += 1
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="Time decode attention on a CPU.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--contexts", default="512,4096,16384")
    parser.add_argument("--dtypes", default="float32,float16,bfloat16,float8_e4m3fn")
    given = parser.parse_args()
    launcher = CpuLauncher(Team(given.threads))
    read = plain_read(launcher)
    print(f"{Processor.detect().name}, {given.threads} threads\n")
    print("| heads, key heads, dimension | context | cache | GB/s | read, GB/s | share | us a layer |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for heads in SHAPES:
        for context in (int(each) for each in given.contexts.split(",")):
            for name in given.dtypes.split(","):
                dtype = getattr(torch, name)
                ours, plain = rates([decode(launcher, heads, context, dtype), read])
                layer = 2e-3 * context * heads[1] * heads[2] * dtype.itemsize / ours
                print(
                    f"| {heads} | {context} | {name} | {ours:.1f} | {plain:.1f} | {ours / plain:.0%} | {layer:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
