"""Times the choice of the next tokens, without a model: `python benchmarks/sampling.py`.

Times `sample` of `sightline.runner.sampling.sampler` on random logits, one thread by default, and prints
the median of several runs as a Markdown table. Peaked logits are normal with a deviation of 4, so that some two
hundred tokens hold nine tenths of the probability; flat ones have a deviation of 0.3, so that most of the vocabulary
does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch

from sightline.core.request import EffectiveParams
from sightline.runner.sampling.sampler import RowSampling, choose

PLAIN = EffectiveParams(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    seed=1234,
    max_tokens=16,
    stop_token_ids=frozenset(),
    skip_special_tokens=True,
)
PEAKED, FLAT = 4.0, 0.3
CASES: dict[str, tuple[float, EffectiveParams]] = {
    "greedy": (PEAKED, replace(PLAIN, temperature=0.0)),
    "temperature 1, peaked": (PEAKED, PLAIN),
    "temperature 1, flat": (FLAT, PLAIN),
    "top_k 20": (PEAKED, replace(PLAIN, top_k=20)),
    "top_p 0.9, peaked": (PEAKED, replace(PLAIN, top_p=0.9)),
    "top_p 0.9, flat": (FLAT, replace(PLAIN, top_p=0.9)),
    "min_p 0.05": (PEAKED, replace(PLAIN, min_p=0.05)),
    "greedy, logprobs 5": (PEAKED, replace(PLAIN, temperature=0.0, logprobs=5)),
}


def milliseconds(logits: torch.Tensor, params: EffectiveParams, runs: int) -> float:
    """Median over `runs` steps, each at other positions, after one step that does not count."""
    taken = []
    for run in range(runs + 1):
        rows = [RowSampling(replace(params, seed=row), run) for row in range(logits.shape[0])]
        start = time.perf_counter()
        choose(logits, rows)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:]) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    logits = torch.randn(given.rows, given.vocabulary, generator=torch.Generator().manual_seed(0))
    print(f"{given.rows} rows x {given.vocabulary} tokens, {given.threads} threads, median of {given.runs} runs\n")
    print("| case | ms |\n|---|---|")
    for name, (scale, params) in CASES.items():
        print(f"| {name} | {milliseconds(logits * scale, params, given.runs):.1f} |")


if __name__ == "__main__":
    main()
