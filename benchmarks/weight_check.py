"""The time that the check of weights for NaN and infinities adds to loading a model.

python benchmarks/weight_check.py [MODEL] [--dtype bfloat16] [--keep]

Loads the model with and without the check in turn, from files in the system's cache, and prints the fastest of each.
Without MODEL it makes a folder of random bf16 weights of 1 GB.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sightline.core.device import single_threaded
from sightline.core.ledger import Ledger
from sightline.kernels.cpu.program import inline_launcher
from sightline.models.loading.opening import open_checkpoint
from sightline.models.registry import define_model
from sightline.models.weights import WeightReader
from sightline.runner.quantised import kept_on_cpu

ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--keep", action="store_true", help="quantised weights stay quantised")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        path = Path(given.model or folder)
        if given.model is None:
            _random_model().save_pretrained(path)
        dtype = getattr(torch, given.dtype)
        gigabytes = (
            sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.safetensors"))) / 1e9
        )
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(ROUNDS):
            for skip, taken in times.items():
                taken.append(_load(path, dtype, keep=given.keep, skip=skip))
        without, checked = min(times[True]), min(times[False])
    print(f"{gigabytes:.3f} GB, {given.dtype}: {without:.3f} s without the check, {checked:.3f} s with it")
    print(f"the check: {(checked - without) / gigabytes:.3f} s per GB of file, {checked / without - 1:.1%} of loading")


def _load(path: Path, dtype: torch.dtype, *, keep: bool, skip: bool) -> float:
    checkpoint = open_checkpoint(path, Ledger())
    kept = kept_on_cpu(inline_launcher(), Ledger()) if keep else None
    start = time.perf_counter()
    reader = WeightReader(checkpoint, dtype, torch.device("cpu"), Ledger(), lambda *_: None, kept=kept, skip_check=skip)
    with single_threaded():
        model = define_model(checkpoint.config, Ledger()).load(reader)
    taken = time.perf_counter() - start
    del model
    return taken


def _random_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=7, num_attention_heads=32
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


if __name__ == "__main__":
    main()
