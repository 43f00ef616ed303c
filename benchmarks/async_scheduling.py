"""Compares asynchronous scheduling (a step is launched before the previous one is read) with synchronous scheduling.

    python benchmarks/async_scheduling.py --device cuda --rows 32

Uses the same random weights for both, which take turns. Checks first that both give the same tokens. Prints the median
time of a decode step, and how long the host waited for the device.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sightline import LLM, SamplingParams
from sightline.engine.sampled import Sampled, SampledTokens

VOCAB = 32_000


def make_weights(folder: str, hidden: int, layers: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def build(folder: str, device: str, rows: int, *, in_flight: bool) -> LLM:
    return LLM(
        folder,
        skip_tokenizer_init=True,
        device=device,
        max_num_seqs=rows,
        max_model_len=1024,
        cache_tokens=1024 * rows,
        prefix_caching=False,
        async_scheduling=in_flight,
    )


def measure(llm: LLM, rows: int, steps: int) -> tuple[list[float], list[float], list[tuple[int, ...]]]:
    """Returns the seconds of each decode step, the seconds of waiting for the device in each, and the tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=steps + 8, ignore_eos=True)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, VOCAB, (rows, 16), generator=generator).tolist()
    requests = [llm.engine.submit(prompt, params) for prompt in prompts]
    waited: list[float] = []
    read = Sampled.read

    def timed(step: Sampled) -> SampledTokens:
        started = time.perf_counter()
        choices = read(step)
        waited.append(time.perf_counter() - started)
        return choices

    Sampled.read = timed  # type: ignore[method-assign, assignment]
    taken = []
    while llm.engine.has_work:
        started = time.perf_counter()
        llm.engine.step()
        taken.append(time.perf_counter() - started)
    Sampled.read = read  # type: ignore[method-assign]
    tokens = [llm.engine.pop_output(request).outputs[0].token_ids for request in requests]
    return taken[4:-4], waited[4:-4], tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_weights(folder, given.hidden, given.layers)
        engines = {
            name: build(folder, given.device, given.rows, in_flight=name == "async") for name in ("sync", "async")
        }
    answers = {name: measure(llm, given.rows, given.steps)[2] for name, llm in engines.items()}
    if answers["sync"] != answers["async"]:
        raise SystemExit("expected the same tokens from both, got different ones: nothing is reported")
    times: dict[str, list[float]] = {name: [] for name in engines}
    waits: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(given.rounds):
        for name, llm in engines.items():
            taken, waited, _ = measure(llm, given.rows, given.steps)
            times[name] += taken
            waits[name] += waited
    for name in engines:
        step, wait = (1000 * statistics.median(each[name]) for each in (times, waits))
        print(f"{name:5}  {step:7.2f} ms per step, of which {wait:6.2f} ms waiting for the device")
    ratio = statistics.median(times["sync"]) / statistics.median(times["async"])
    print(f"sync / async: {ratio:.2f}x  ({given.rows} rows, {given.layers} layers of {given.hidden}, {given.device})")


if __name__ == "__main__":
    main()
