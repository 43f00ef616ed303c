"""Times CPU products by the type of the weights, against a plain read of memory and torch's fp32 product.

    python benchmarks/cpu_products.py [--threads 2] [--types Q4_0,Q8_0] [--rows 1,16,512] [--shapes 49152x576]

Every cell is the best of several runs that take turns. With one row a product is limited by memory: the table has GB of
weights per second beside the read rate. With more rows it has billions of multiplications and additions per second.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from sightline.kernels.coded_weights import CodedWeights, CodeForm
from sightline.kernels.cpu.processor import Processor
from sightline.kernels.cpu.program import CpuLauncher
from sightline.kernels.cpu.team import Team
from sightline.layers.cpu_compute import CpuCompute
from sightline.layers.cpu_linear import CodedLinear, CpuLinear
from sightline.layers.linear import Linear
from sightline.models.loading.gguf.codes import code_form
from sightline.models.loading.gguf.types import STORAGE_BY_CODE

SHAPES = "49152x576,3072x576,1536x576,576x1536,576x576,4096x4096"
READ_ELEMENTS = 60_000_000
FLUSH_BYTES = 96 << 20
"""More than the caches hold. Weights are copied until they are as large, and the copies take turns."""
SECONDS = 0.6


def random_weights(form: CodeForm, outputs: int, inputs: int) -> CodedWeights:
    """Weights whose values do not matter."""
    scales = torch.rand(outputs, inputs // form.span).half()
    steps = torch.randint(0, 64, (outputs, inputs // form.group), dtype=torch.int8)
    minimum_steps = torch.randint(0, 64, (outputs, inputs // 32), dtype=torch.int8)
    return CodedWeights(
        form,
        torch.randint(0, 1 << form.bits, (outputs, inputs), dtype=torch.uint8),
        scales,
        -scales if form.has_minima else None,
        steps if form.has_steps else None,
        minimum_steps if form.has_steps and form.has_minima else None,
    )


def best_of(work: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The shortest time of each, in seconds. They take turns."""
    best = dict.fromkeys(work, float("inf"))
    end = time.perf_counter() + SECONDS * len(work)
    rounds = 0
    while rounds < 3 or time.perf_counter() < end:
        for name, run in work.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
        rounds += 1
    return best


def repeated(launcher: CpuLauncher, projections: list[CodedLinear] | list[CpuLinear], rows: int) -> Callable[[], None]:
    """A recorded program of all copies, one after the other, so that no weight is in a cache."""
    x = torch.randn(rows, projections[0].in_features)
    out = torch.empty(rows, projections[0].out_features)
    with launcher.recording() as tape:
        for projection in projections:
            projection(x, out)
    program = tape.program()
    return lambda: launcher.run(program)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time CPU products with quantised weights.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--types", default="Q8_0,Q4_0,Q4_1,Q5_0,Q4_K,Q5_K,Q6_K")
    parser.add_argument("--rows", default="1,16,512")
    parser.add_argument("--shapes", default=SHAPES)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    launcher = CpuLauncher(Team(given.threads))
    compute = CpuCompute.on(launcher)
    forms = {storage.name: code_form(storage) for storage in STORAGE_BY_CODE.values()}
    memory = torch.ones(READ_ELEMENTS)
    print(f"{Processor.detect().name}, {Processor.detect().instructions.value}, {given.threads} threads\n")
    print("| shape | type | rows | GB/s of weights | read, GB/s | GOP/s | torch fp32, GOP/s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for shape in given.shapes.split(","):
        outputs, inputs = (int(part) for part in shape.split("x"))
        dense = Linear(torch.randn(outputs, inputs))
        for name in given.types.split(","):
            form = forms[name]
            if form is None or inputs % form.span:
                continue
            weights = random_weights(form, outputs, inputs)
            first = CodedLinear(compute.pack([weights]), None, compute)
            for rows in (int(count) for count in given.rows.split(",")):
                copies = max(1, FLUSH_BYTES // first.num_bytes) if rows == 1 else 1
                projections = [first, *(CodedLinear(compute.pack([weights]), None, compute) for _ in range(copies - 1))]
                x, out = torch.randn(rows, inputs), torch.empty(rows, outputs)
                with torch.inference_mode():
                    best = best_of(
                        {
                            "ours": repeated(launcher, projections, rows),
                            "torch": partial(dense, x, out),
                            "read": memory.sum,
                        }
                    )
                operations = 2e-9 * rows * outputs * inputs
                rate = copies * first.num_bytes / best["ours"] / 1e9
                print(
                    f"| {shape} | {name} | {rows} | {rate:.1f} | {memory.nbytes / best['read'] / 1e9:.1f} "
                    f"| {copies * operations / best['ours']:.0f} | {operations / best['torch']:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
