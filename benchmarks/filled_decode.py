"""Decodes behind long contexts that nobody read: `python benchmarks/filled_decode.py`.

Reading 64 prompts of 32,768 tokens takes longer than timing what follows them, so the caches and states of the rows are
filled with random numbers. The shapes are those of DeepSeek V4 by default, or `--shape ROWS TOKENS` of another
`--model-config`; the weights are random.

Steps are given to the device without waiting for their tokens, in CUDA graphs. First, the logits of a short shape are
compared with those of torch's backends (`--reference`), and nothing is reported if they differ. The floor is that of
`sightline bench latency`, at the rate of a copy on this device: the weights that a step reads, if experts are chosen
evenly, and the caches and states of its rows. Idle is what the kernels of a step, as the profiler has them, leave of
its time without the profiler. Prints Markdown. `--cpu` tries the script with a tiny model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sightline.bench.attention.timing import measure_rates
from sightline.bench.engine.profile_step import busy_seconds, card_spans, kernel_times
from sightline.bench.engine.work import find_config
from sightline.bench.floor import Floor, Machine, cache_reads, model_size
from sightline.bench.tables import markdown_table
from sightline.core.batch import RowWork, StepWork
from sightline.core.config import EngineConfig
from sightline.core.ledger import Ledger
from sightline.models.random_weights import RandomCheckpoint
from sightline.runner.build import build_runtime
from sightline.runner.runtime import Runtime

TOLERANCE = 3e-2
"""Of the logits' norm: both compute in bf16, in another order."""
COMPARED_STEPS = 3
ROUNDS = 3
SHOWN = 30
ROOM = 1024
"""Tokens by which a row may grow."""


@dataclass(frozen=True)
class Shape:
    """Rows of equal length."""

    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.rows} × {self.tokens:,}"


def build(config: Path, settings: dict[str, Any], shapes: Sequence[Shape]) -> tuple[Runtime, RandomCheckpoint]:
    """An engine's runtime with room for each of the shapes."""
    rows = sorted({shape.rows for shape in shapes})
    engine = EngineConfig(
        **settings,
        max_model_len=max(shape.tokens for shape in shapes) + ROOM,
        cache_tokens=max(shape.rows * (shape.tokens + ROOM) for shape in shapes),
        max_num_seqs=rows[-1],
        max_num_batched_tokens=max(64, rows[-1]),
        cuda_graph_sizes=",".join(map(str, rows)) if settings["device"] == "cuda" else None,
    )
    ledger = Ledger()
    checkpoint = RandomCheckpoint(config, torch.device(settings["device"]), ledger)
    return build_runtime(engine, checkpoint, ledger), checkpoint


class FilledRows:
    """Rows whose caches and states are random numbers, the same for the same row in any runtime."""

    def __init__(self, runtime: Runtime, shape: Shape) -> None:
        self.length = shape.tokens
        self._runtime = runtime
        self._tokens = torch.Generator().manual_seed(shape.rows)
        self._rows = [runtime.store.open_row() for _ in range(shape.rows)]
        for number, row in enumerate(self._rows):
            runtime.store.grow_row(row, shape.tokens + ROOM)
            runtime.store.fill_row(row, shape.tokens)
            self._fill_entries(number, row)
            self._fill_states(number, row)

    def _fill_entries(self, number: int, row: int) -> None:
        for pool in self._runtime.store.pools:
            device, entries = pool.table.pages.device, self.length // pool.spec.tokens_per_entry
            places = torch.arange(entries, device=device)
            slots = pool.entry_slots(torch.full_like(places, row), places)
            for spec in pool.spec.planes:
                for layer, plane in enumerate(pool.plane(spec.name)):
                    generator = torch.Generator(device).manual_seed(1000 * number + layer)
                    values = torch.randn(entries, *spec.shape, generator=generator, device=device)
                    plane.index_copy_(0, slots, values.to(spec.dtype))

    def _fill_states(self, number: int, row: int) -> None:
        table = self._runtime.network.cache.lengths.states
        if table is None:
            return
        [slot] = table.slots_to_read([row], [self.length])
        for binding in self._runtime.bindings:
            states = binding.cache.states
            for spec in states.spec.planes:
                for layer, plane in enumerate(states.plane(spec.name)):
                    generator = torch.Generator(plane.device).manual_seed(1000 * number + layer)
                    # Sums of exponentials are positive.
                    values = torch.rand(spec.shape, generator=generator, device=plane.device) + 0.5
                    plane[slot] = values.to(spec.dtype)

    def step(self) -> Tensor:
        """Launches a step of one token a row, and commits it. Returns its logits."""
        network = self._runtime.network
        tokens = torch.randint(self._runtime.definition.vocab_size, (len(self._rows),), generator=self._tokens).tolist()
        work = [RowWork(row, [token], self.length, 1) for row, token in zip(self._rows, tokens, strict=True)]
        logits = network.runner.forward(network.planner.plan(network.graphs.assemble(StepWork.of(work))))
        self.length += 1
        for row in self._rows:
            self._runtime.store.lengths.commit(row, self.length)
        return logits

    def close(self) -> None:
        for row in self._rows:
            self._runtime.store.close_row(row)


def first_logits(runtime: Runtime, shape: Shape) -> Tensor:
    """[steps, rows, vocab] fp32 on the host."""
    rows = FilledRows(runtime, shape)
    logits = torch.stack([rows.step().float().cpu() for _ in range(COMPARED_STEPS)])
    rows.close()
    return logits


@dataclass(frozen=True)
class Timed:
    """How long the steps of a shape take."""

    shape: Shape
    seconds: float
    busy: float
    """Seconds per step in which the device works; the step's own on a CPU."""
    floor: float
    kernels: list[list[str]]


def time_shape(runtime: Runtime, floor: Floor, shape: Shape, steps: int) -> Timed:
    rows, on_card = FilledRows(runtime, shape), runtime.config.device.torch_device.type == "cuda"

    def run() -> float:
        begun = time.perf_counter()
        for _ in range(steps):
            rows.step()
        if on_card:
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / steps

    run()
    seconds = min(run() for _ in range(ROUNDS))
    busy, kernels = seconds, list[list[str]]()
    if on_card:
        spans = card_spans(run)
        busy = busy_seconds(spans) / steps
        longest = sorted(kernel_times(spans, steps), key=lambda each: -each.seconds)[:SHOWN]
        kernels = [[each.name[:90], f"{each.calls:.1f}", f"{each.seconds * 1e6:.1f}"] for each in longest]
    rows.close()
    return Timed(shape, seconds, busy, floor.decode([shape.tokens] * shape.rows), kernels)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-config", default="deepseek-v4-4-layers")
    parser.add_argument("--shape", nargs=2, type=int, action="append", metavar=("ROWS", "TOKENS"))
    parser.add_argument("--attention-backend", default="triton-compressed,triton-compressed-index")
    parser.add_argument("--reference", default="torch-compressed,torch-compressed-index", help="empty: no comparison")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--cpu", action="store_true", help="try the script with a tiny model")
    options = parser.parse_args(arguments)
    given = [Shape(*shape) for shape in options.shape or [(1, 131_072), (64, 32_768)]]
    settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "attention_backend": options.attention_backend}
    short, config, steps = Shape(2, 4096), find_config(options.model_config), options.steps
    if options.cpu:
        settings = {"device": "cpu", "dtype": "float32", "attention_backend": "torch-compressed,torch-compressed-index"}
        given, short, config, steps = [Shape(1, 256), Shape(2, 128)], Shape(2, 64), find_config("deepseek-v4-small"), 4
    expected = None
    if options.reference:
        plain, _ = build(config, settings | {"attention_backend": options.reference}, [short])
        expected = first_logits(plain, short)
        del plain
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    runtime, checkpoint = build(config, settings, [short, *given])
    if expected is not None:
        error = float((first_logits(runtime, short) - expected).norm() / expected.norm())
        if not error <= TOLERANCE:
            raise SystemExit(
                f"expected logits within {TOLERANCE} of {options.reference}, got a difference of {error:.3g}"
            )
        print(f"logits of {short} differ by {error:.1e} from those of {options.reference}\n")
    dtype = runtime.config.dtype
    size = model_size(checkpoint, dtype, runtime.config.quantization.value, runtime.definition.expert_stacks)
    rates = measure_rates(runtime.config.device, dtype)
    floor = Floor(Machine(rates.bytes_per_second, rates.operations_per_second), size, cache_reads(runtime))
    layers = sum(len(binding.group.layers) for binding in runtime.bindings)
    found = [time_shape(runtime, floor, shape, steps) for shape in given]
    print(f"{config.stem}, {layers} layers of attention, {floor.machine}\n")
    table = [
        [
            str(each.shape),
            *(f"{part * 1e3:.3f}" for part in (each.seconds, each.busy, each.floor)),
            f"{each.floor / each.seconds:.0%}",
            f"{max(0.0, 1 - each.busy / each.seconds):.1%}",
        ]
        for each in found
    ]
    heading = "rows × tokens | step, ms | device busy, ms | floor, ms | of the floor | idle"
    print("\n".join(markdown_table(heading, table)), flush=True)
    for each in found:
        print("\n".join(["", *markdown_table(f"kernel at {each.shape} | calls per step | µs per step", each.kernels)]))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
