"""Times matrix products with few rows, by the order of the operands and the form of the weights.

    python benchmarks/products.py [--rows 1,4,16,64]

Multiplies with all matrices of the default model's layers and with its output projection, one after the other as a
step does, so that weights are read from memory and not from a cache. Prints total milliseconds as a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from sightline.core.ledger import Ledger
from sightline.kernels.cpu.program import CpuLauncher
from sightline.kernels.cpu.team import Team
from sightline.layers.linear import Projection
from sightline.models.decoder import Decoder
from sightline.models.kept_weights import KeptWeights
from sightline.models.loading.default_model import default_model_path
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import define_model
from sightline.models.weights import WeightReader
from sightline.runner.quantised import kept_on_cpu

ROUNDS = 7


def projections(kept: KeptWeights | None) -> list[Projection]:
    """Every projection of the default model, in the order of a step."""
    checkpoint = open_checkpoint(default_model_path(), Ledger())
    reader = WeightReader(checkpoint, torch.float32, torch.device("cpu"), Ledger(), lambda *_: None, kept=kept)
    decoder = define_model(checkpoint.config, Ledger()).load(reader)
    assert isinstance(decoder, Decoder)
    every: list[Projection] = []
    for layer in decoder.states.layers:
        every += [layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down]  # type: ignore[union-attr]
    return [*every, decoder.head]


def row_major(rows: int, features: int) -> Tensor:
    return torch.randn(rows, features)


def feature_major(rows: int, features: int) -> Tensor:
    return torch.randn(features, rows).t()


def milliseconds(every: list[Projection], rows: int, make: Callable[[int, int], Tensor]) -> float:
    """Median time of all products with that many rows."""
    inputs = {each.in_features: make(rows, each.in_features) for each in every}
    outputs = {each.out_features: make(rows, each.out_features) for each in every}
    times = []
    with torch.inference_mode():
        for _ in range(ROUNDS + 1):
            start = time.perf_counter()
            for each in every:
                each(inputs[each.in_features], outputs[each.out_features])
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="Time matrix products with few rows.")
    parser.add_argument("--rows", default="1,2,4,6,8,16,32,48,64,128")
    rows = [int(count) for count in parser.parse_args().rows.split(",")]
    exact, kept = projections(None), projections(kept_on_cpu(CpuLauncher(Team(torch.get_num_threads())), Ledger()))
    print(f"{torch.get_num_threads()} threads, ms for all products of a step\n")
    print("| rows | x Wᵀ | W x | kept quantised |")
    print("| --- | --- | --- | --- |")
    for count in rows:
        cells = [
            milliseconds(exact, count, row_major),
            milliseconds(exact, count, feature_major),
            milliseconds(kept, count, row_major),
        ]
        print(f"| {count} | {' | '.join(f'{cell:.1f}' for cell in cells)} |", flush=True)


if __name__ == "__main__":
    main()
