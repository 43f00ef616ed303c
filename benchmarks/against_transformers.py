"""Sightline and transformers on the default model, fp32, side by side in one run, with the floor.

    .venv/bin/python benchmarks/against_transformers.py

Checks first that both give the same greedy tokens and reports nothing if they do not. Runs of the two engines
alternate, and medians are printed, because timings on a shared machine drift.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from sightline import LLM, SamplingParams
from sightline.models.loading.default_model import default_model_path

ROUNDS = 5
PROMPT_LEN = 32
DECODE_TOKENS = 48
PREFILL_LEN = 512


def median_seconds(runs: dict[str, Callable[[], None]]) -> dict[str, float]:
    """The median time of each, taken in turns."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def machine_rates() -> tuple[float, float]:
    """Bytes a second that a matrix-vector product reads, and operations a second of a square product, in fp32."""
    large, vector, square = torch.ones(1 << 14, 1 << 13), torch.ones(1 << 13), torch.ones(2048, 2048)
    seconds = median_seconds({"read": lambda: _ignore(large @ vector), "product": lambda: _ignore(square @ square)})
    return large.nbytes / seconds["read"], 2 * 2048**3 / seconds["product"]


def _ignore(result: object) -> None:
    del result


def generate_ours(llm: LLM, prompts: list[list[int]], count: int) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def generate_theirs(model: PreTrainedModel, prompts: list[list[int]], count: int) -> list[tuple[int, ...]]:
    ids = torch.tensor(prompts)
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=count,
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return [tuple(row) for row in generated[:, ids.shape[1] :].tolist()]


def first_token_seconds() -> tuple[float, float]:
    """Importing torch, and from there to the first token, in a fresh process."""
    code = (
        "import time; a = time.perf_counter(); import torch; b = time.perf_counter();"
        "from sightline import LLM, SamplingParams;"
        "next(LLM().stream('The capital of France is', SamplingParams(max_tokens=2)));"
        "print(b - a, time.perf_counter() - b)"
    )
    runs = []
    for _ in range(ROUNDS):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        runs.append((float(out[0]), float(out[1])))
    return statistics.median(run[0] for run in runs), statistics.median(run[1] for run in runs)


def main() -> None:
    path = default_model_path()
    llm = LLM()
    theirs: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(0)
    vocab = llm.engine.vocab_size
    prompts = torch.randint(100, vocab, (16, PROMPT_LEN), generator=generator).tolist()
    long = torch.randint(100, vocab, (1, PREFILL_LEN), generator=generator).tolist()
    if generate_ours(llm, prompts[:4], 16) != generate_theirs(theirs, prompts[:4], 16):
        raise SystemExit("the two engines' greedy tokens differ: no speed is reported")

    bandwidth, rate = machine_rates()
    weights = sum(parameter.numel() for parameter in theirs.parameters())
    embedding = theirs.get_input_embeddings().weight.numel()
    print(f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"read {bandwidth / 1e9:.1f} GB/s, product {rate / 1e9:.0f} GFLOP/s, weights {weights * 4 / 1e6:.0f} MB\n")
    print("| work | Sightline | transformers | ratio | floor | of the floor |")
    print("| --- | --- | --- | --- | --- | --- |")

    def report(name: str, rows: list[list[int]], count: int, tokens: int, floor_seconds: float) -> None:
        seconds = median_seconds(
            {
                "ours": lambda: _ignore(generate_ours(llm, rows, count)),
                "theirs": lambda: _ignore(generate_theirs(theirs, rows, count)),
            }
        )
        ours, other, floor = tokens / seconds["ours"], tokens / seconds["theirs"], tokens / floor_seconds
        print(
            f"| {name} | {ours:.1f} tok/s | {other:.1f} tok/s | {ours / other:.2f}× | {floor:.0f} tok/s "
            f"| {ours / floor:.0%} |"
        )

    prefill_floor = 2 * (weights - embedding) * PREFILL_LEN / rate
    report(f"prefill {PREFILL_LEN}", long, 1, PREFILL_LEN, prefill_floor)
    for count in (1, 16):
        step = max(weights * 4 / bandwidth, 2 * weights * count / rate)
        report(f"decode, {count} rows", prompts[:count], DECODE_TOKENS, count * DECODE_TOKENS, step * DECODE_TOKENS)
    torch_seconds, beyond = first_token_seconds()
    print(f"\nfirst token, fresh process: {beyond:.2f} s beyond importing torch ({torch_seconds:.2f} s)")


if __name__ == "__main__":
    main()
