"""Compares quantised with exact compute: logits and perplexity of a fixed text.

    python benchmarks/quantised_accuracy.py [--model FILE.gguf] [--compare]

Runs TEXT with exact weights, then with `--quantization keep`, with `--compare` also in llama.cpp on the same file, and
prints a Markdown table: perplexity, and how far the logits are from the exact ones at every position.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from torch import Tensor

from sightline import LLM
from sightline.bench.engine.llama_cpp import LlamaCpp, LlamaSettings
from sightline.core.batch import RowWork
from sightline.models.loading.default_model import default_model_path
from sightline.runner.batching import assemble

TEXT = """\
The harbour was quiet when the first boats came in. Nets lay in heaps along the wall, and the smell of salt and diesel
hung over the water. Marta counted the crates as they were lifted out: eleven of herring, four of mackerel, one of
crabs that nobody had asked for. "We said ten," the buyer told her. She shrugged. The sea does not read contracts.

A lighthouse works by simple optics. A lamp stands at the focus of a lens whose rings bend the light into a narrow
beam. The lens turns, and a sailor far away sees a flash each time the beam sweeps past. By counting the seconds
between two flashes and comparing the number with a printed list, the sailor knows which lighthouse it is, and so
where the ship must be. No two neighbouring lights share the same rhythm.

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

The function above fails for an empty list, because it divides by zero. A careful programmer either checks for that
case first or says in the documentation that the list must not be empty. Both are better than returning zero, which
looks like an answer and is not one.

In the year after the flood the town built a second bridge. It was longer than the old one and stood on higher ground,
so that the road would stay open even when the river rose. People complained about the cost at first. Then the next
spring came, the water climbed over the meadows, and for three weeks the new bridge was the only way to the hospital.
"""


def score(llm: LLM, tokens: list[int]) -> Tensor:
    """The logits behind every token but the last, [len(tokens) - 1, vocab_size]."""
    runtime = llm.engine.runtime
    row = runtime.store.open_row()
    runtime.store.grow_row(row, len(tokens))
    batch = assemble([RowWork(row, tokens, context_len=0, num_logits=len(tokens))], runtime.store)
    return runtime.runner.forward(runtime.planner.plan(batch))[:-1].clone()


def llama_cpp_score(path: Path, tokens: list[int]) -> Tensor:
    settings = LlamaSettings(
        threads=2,
        max_rows=1,
        max_tokens=len(tokens),
        cache_type=GGMLQuantizationType.F32,
        flash_attention=False,
    )
    return torch.from_numpy(LlamaCpp(path, settings).logits(tokens))[:-1]


def table_row(name: str, logits: Tensor, exact: Tensor, following: Tensor) -> str:
    perplexity = F.cross_entropy(logits, following).exp()
    error = logits - exact
    share = error.square().mean().sqrt() / exact.square().mean().sqrt()
    same = (logits.argmax(-1) == exact.argmax(-1)).float().mean()
    divergence = F.kl_div(logits.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="batchmean")
    return (
        f"| {name} | {len(following)} | {perplexity:.4f} | {share:.2%} | {error.abs().max():.3f} | {same:.1%} | "
        f"{divergence:.5f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare quantised with exact compute.")
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file; default: the default model")
    parser.add_argument("--compare", action="store_true", help="also run llama.cpp")
    arguments = parser.parse_args()
    path: Path = arguments.model or default_model_path()
    llms = {
        kind: LLM(str(path), quantization=kind, max_num_batched_tokens=1024, device="cpu")
        for kind in ("dequantise", "keep")
    }
    tokens = list(llms["keep"].get_tokenizer().encode_prompt(TEXT))
    following = torch.tensor(tokens[1:])
    scores = {kind: score(llm, tokens) for kind, llm in llms.items()}
    if arguments.compare:
        scores["llama.cpp"] = llama_cpp_score(path, tokens)
    print("| weights | tokens | perplexity | logits' error, rms of rms | largest | same best token | mean KL |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, logits in scores.items():
        print(table_row(name, logits, scores["dequantise"], following))


if __name__ == "__main__":
    main()
