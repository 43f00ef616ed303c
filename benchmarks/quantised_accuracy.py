"""How far quantised compute is from exact compute: logits and perplexity over a fixed text.

    python benchmarks/quantised_accuracy.py [--model FILE.gguf]

Scores TEXT with exact weights, then with `--quantization keep`, and prints a Markdown table: the mean and the largest
difference of the log-probability of the text's own tokens, and the perplexity of each.
"""

from __future__ import annotations

import argparse
import math

from sightline import LLM, SamplingParams

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


def log_probabilities(model: str | None, quantization: str) -> list[float]:
    """Of each token of the text after the first, given those before it."""
    llm = LLM(model, quantization=quantization)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate([TEXT], params, use_tqdm=False)
    if output.prompt_logprobs is None:
        raise SystemExit(f"expected the prompt's log-probabilities, got an error: {output.error}")
    tokens = output.prompt_token_ids
    return [
        chosen[token].logprob
        for token, chosen in zip(tokens, output.prompt_logprobs, strict=True)
        if chosen is not None
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=None, help="a GGUF file; the default model without it")
    model = parser.parse_args().model
    scores = {kind: log_probabilities(model, kind) for kind in ("dequantise", "keep")}
    exact = scores["dequantise"]
    print("| weights | tokens | perplexity | mean difference of a token's log-probability | largest |")
    print("| --- | --- | --- | --- | --- |")
    for kind, values in scores.items():
        differences = [abs(ours - theirs) for ours, theirs in zip(values, exact, strict=True)]
        perplexity = math.exp(-sum(values) / len(values))
        mean = sum(differences) / len(differences)
        print(f"| {kind} | {len(values)} | {perplexity:.4f} | {mean:.5f} | {max(differences):.4f} |")


if __name__ == "__main__":
    main()
