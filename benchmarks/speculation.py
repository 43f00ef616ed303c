"""Times answers with and without guessed tokens, on text that repeats its prompt and on text that does not.

    python benchmarks/speculation.py [--model MODEL] [--rounds 3] [--config '{"method": "ngram"}']

Both engines take turns; the best round of each counts. Answers must be equal.
"""

from __future__ import annotations

import argparse
import time

from sightline import LLM, SamplingParams

TEXT = (
    "The committee met on Tuesday to review the proposal. The proposal asks for three new bridges over the river, a "
    "tunnel below the market square, and a tram line to the northern suburbs. The committee approved the bridges and "
    "the tram line, and asked for a new estimate of the cost of the tunnel below the market square. Members of the "
    "public may comment until the end of the month."
)
WORKLOADS = {
    "repeat": f"Repeat this text exactly, word for word:\n\n{TEXT}\n\nHere it is again:\n\nThe committee met on",
    "edit": f"Write this text again with better spelling:\n\n{TEXT}\n\nThe text with better spelling:\n\n",
    "summary": f"{TEXT}\n\nSummary: The committee",
    "new text": "A list of unrelated words, none of which comes twice: apple, granite, velocity,",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--config", default='{"method": "ngram"}')
    given = parser.parse_args()
    plain = LLM(given.model, max_model_len=2048)
    guessing = LLM(given.model, max_model_len=2048, speculative_config=given.config)
    print(
        "| text | temperature | tokens | none, tokens/s | guessed, tokens/s | ratio | steps a token | guesses right |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, prompt in WORKLOADS.items():
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=given.tokens, ignore_eos=True)
            best = [float("inf")] * 2
            answers: list[tuple[int, ...]] = [(), ()]
            for llm in (plain, guessing):
                llm.generate(prompt, params, use_tqdm=False)
            guessing.engine.reset_counts()
            for _ in range(given.rounds):
                for index, llm in enumerate((plain, guessing)):
                    start = time.perf_counter()
                    [output] = llm.generate(prompt, params, use_tqdm=False)
                    best[index] = min(best[index], time.perf_counter() - start)
                    answers[index] = output.outputs[0].token_ids
            assert answers[0] == answers[1], f"{name}: guesses changed the answer"
            counts, count = guessing.engine.metrics(), len(answers[0])
            right = counts.spec_decode_num_accepted_tokens / max(1, counts.spec_decode_num_draft_tokens)
            rates = [count / seconds for seconds in best]
            steps = counts.steps / max(1, counts.generation_tokens)
            print(
                f"| {name} | {temperature} | {count} | {rates[0]:.1f} | {rates[1]:.1f} | {rates[1] / rates[0]:.2f}× | "
                f"{steps:.2f} | {right:.0%} |"
            )


if __name__ == "__main__":
    main()
