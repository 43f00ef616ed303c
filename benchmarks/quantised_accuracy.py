"""Compares quantised with exact compute: logits and perplexity of a fixed text.

    python benchmarks/quantised_accuracy.py [--model FILE.gguf]

Runs TEXT with exact weights, then with `--quantization keep`, and prints a Markdown table: perplexity, and how far the
logits are from the exact ones at every position.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor

from sightline import LLM
from sightline.core.batch import RowWork
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


def score(model: str | None, quantization: str) -> tuple[Tensor, Tensor]:
    """Returns logits [num_tokens - 1, vocab_size] of all tokens but the last, and the tokens that follow them."""
    llm = LLM(model, quantization=quantization, max_num_batched_tokens=1024)
    runtime, tokens = llm.engine.runtime, llm.get_tokenizer().encode_prompt(TEXT)
    row = runtime.store.open_row()
    runtime.store.grow_row(row, len(tokens))
    batch = assemble([RowWork(row, tokens, context_len=0, num_logits=len(tokens))], runtime.store)
    logits = runtime.runner.forward(runtime.planner.plan(batch))
    return logits[:-1], torch.tensor(tokens[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare quantised with exact compute.")
    parser.add_argument("--model", default=None, help="a GGUF file; default: the default model")
    model = parser.parse_args().model
    exact, following = score(model, "dequantise")
    print("| weights | tokens | perplexity | logits' error, rms of rms | largest | same best token | mean KL |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for kind in ("dequantise", "keep"):
        logits = exact if kind == "dequantise" else score(model, kind)[0]
        perplexity = F.cross_entropy(logits, following).exp()
        error = logits - exact
        share = error.square().mean().sqrt() / exact.square().mean().sqrt()
        same = (logits.argmax(-1) == exact.argmax(-1)).float().mean()
        divergence = F.kl_div(logits.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="batchmean")
        print(
            f"| {kind} | {len(following)} | {perplexity:.4f} | {share:.2%} | {error.abs().max():.3f} | {same:.1%} | "
            f"{divergence:.5f} |"
        )


if __name__ == "__main__":
    main()
