"""Times decoding with a drafter whose guesses are right with a given probability, against decoding without one.

    python benchmarks/scripted_drafts.py [--model-config llama-8b] [--honesty 0.8] [--guesses 7] [--rows 1]

The weights are random but for the output projection, which says that each token is followed by the next one in the
vocabulary. So the answer is known, whatever rounding does, and what is measured is verification: a step of several
tokens, its plan, and the host's work between two steps. Reports tokens a second of both, tokens a step, and for how
much of a step the device does nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from sightline import LLM, SamplingParams
from sightline.bench.engine.profile_step import DeviceSpan, busy_seconds
from sightline.bench.engine.work import find_config
from sightline.core.config import EngineKeywords
from sightline.core.ledger import Ledger
from sightline.engine import engine as engine_module
from sightline.models.random_weights import RandomCheckpoint
from sightline.opening import build_engine_of
from sightline.speculative.drafter import DrafterContext, DrafterOfTexts, TextDrafter
from sightline.speculative.drafts import AdaptiveDrafts


class CountingCheckpoint(RandomCheckpoint):
    """A model that counts: behind each token comes the next one of the vocabulary."""

    def _read(self, name: str) -> Tensor:
        if name == "lm_head.weight":
            return super()._read("model.embed_tokens.weight").roll(1, 0)
        return super()._read(name)


class Scripted(TextDrafter):
    """Counts on, and tells the truth with a given probability."""

    def __init__(self, honesty: float, random: Random) -> None:
        self._honesty, self._random = honesty, random

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        return [tokens[-1] + 1 + place if self._random.random() < self._honesty else 0 for place in range(most)]


def generate(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> tuple[float, list[list[int]]]:
    """Seconds from the first token on, and the answers."""
    engine = llm.engine
    asked = [engine.submit(prompt, params) for prompt in prompts]
    while engine.metrics().generation_tokens == 0:
        engine.step()
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - started
    return seconds, [list(engine.pop_output(each).outputs[0].token_ids) for each in asked]


def busy(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, steps: int) -> float:
    """Seconds of a step in which the device does something. A profiler slows down the host, and not its kernels."""
    engine = llm.engine
    asked = [engine.submit(prompt, params) for prompt in prompts]
    for _ in range(8):
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    spans = [
        DeviceSpan(each.name, each.time_range.start / 1e6, each.time_range.end / 1e6)
        for each in found.events() or ()
        if each.device_type == DeviceType.CUDA and not each.is_user_annotation
    ]
    for each in asked:
        engine.forget(each)
    while engine.has_work:
        engine.step()
    return busy_seconds(spans) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-config", default="llama-8b")
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--honesty", type=float, default=0.8)
    parser.add_argument("--guesses", type=int, default=7)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    settings: dict[str, Any] = {
        "attention_backend": given.attention_backend,
        "max_model_len": 2048,
        "cache_tokens": 65536,
        "max_num_seqs": max(8, given.rows),
        "max_num_batched_tokens": 2048,
    }
    draw = Random(0)
    prompts = [[draw.randrange(10, 1000) for _ in range(given.input_len)] for _ in range(given.rows)]
    params = SamplingParams(temperature=0.0, max_tokens=given.output_len, ignore_eos=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint = CountingCheckpoint(find_config(given.model_config), device, Ledger())

    def load(**more: Any) -> LLM:
        config = EngineKeywords(skip_tokenizer_init=True, prefix_caching=False, **settings, **more)
        return LLM.of(build_engine_of(config, checkpoint, Ledger()))

    plain = load()
    drafter = DrafterOfTexts(lambda: Scripted(given.honesty, Random(1)))

    def scripted(context: DrafterContext) -> AdaptiveDrafts:
        return AdaptiveDrafts(drafter, given.guesses, 128, context.ledger, vocab_size=context.vocab_size, patience=2)

    engine_module.make_drafts = scripted  # type: ignore[attr-defined]
    config = {"method": "ngram", "num_speculative_tokens": given.guesses}
    guessing = load(speculative_config=config)
    rates: dict[str, list[float]] = {"none": [], "guessed": []}
    count = given.rows * (given.output_len - 1)
    truth = [[prompt[-1] + 1 + place for place in range(given.output_len)] for prompt in prompts]
    for _ in range(given.rounds):
        for name, llm in (("none", plain), ("guessed", guessing)):
            llm.engine.reset_counts()
            seconds, found = generate(llm, prompts, params)
            rates[name].append(count / seconds)
            assert found == truth, f"{name}: expected to count, got {found}"
        counts = guessing.engine.metrics()
    right = counts.spec_decode_num_accepted_tokens / max(1, counts.spec_decode_num_draft_tokens)
    a_draft = 1 + counts.spec_decode_num_accepted_tokens / max(1, counts.spec_decode_num_drafts)
    none, guessed = (statistics.median(each[1:]) for each in rates.values())
    print(f"{given.model_config}, {given.rows} rows, {given.guesses} guesses, honesty {given.honesty}")
    print(f"tokens/s: none {none:.1f}, guessed {guessed:.1f}: {guessed / none:.2f}x")
    print(f"tokens a draft {a_draft:.2f}, guesses right {right:.0%}, steps {counts.steps}")
    for name, llm in (("none", plain), ("guessed", guessing)):
        engine = llm.engine
        per_step = given.rows * (a_draft if name == "guessed" else 1.0) / statistics.median(rates[name][1:])
        line = f"{name}: {1e3 * per_step:.3f} ms a step"
        if torch.cuda.is_available():
            seconds = busy(llm, prompts, params, 40)
            line += f", device busy {1e3 * seconds:.3f} ms, idle {1.0 - seconds / per_step:.1%}"
        total = sum(engine.phases.seconds.values())
        shares = {phase.value: f"{each / total:.0%}" for phase, each in engine.phases.seconds.items()}
        print(line, shares, f"replayed {engine.runtime.runner.num_replayed}")


if __name__ == "__main__":
    main()
