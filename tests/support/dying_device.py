"""A program that makes the GPU fail in the middle of its requests, and prints how each of them ended."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from sightline import LLM, SamplingParams
from sightline.attention.planner import PlannedBatch
from sightline.core.errors import EngineClosedError
from sightline.runner.replicas import Beside
from support.tiny_models import random_prompts


def main(folder: str) -> None:
    llm = LLM(folder, skip_tokenizer_init=True, cache_tokens=1024, device="cuda", dtype="float32")
    engine, forward, num_forwards = llm.engine, llm.engine.runtime.runner.forward, 0

    def dying(planned: PlannedBatch, states: torch.Tensor | None = None, beside: Sequence[Beside] = ()) -> torch.Tensor:
        nonlocal num_forwards
        num_forwards += 1
        logits = forward(planned, states, beside)
        if num_forwards == 4:
            # An index out of bounds: the kernel asserts, and nothing on the device works any more.
            logits[torch.tensor([10**6], device="cuda")]
        return logits

    engine.runtime.runner.forward = dying  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.0)
    requests = [engine.submit(prompt, params) for prompt in random_prompts([9, 14, 3, 11, 6])]
    while engine.has_work:
        engine.step()
    for request in requests:
        print(engine.pop_output(request).outputs[0].finish_reason)
    try:
        engine.submit([1, 2], params)
    except EngineClosedError:
        print("closed")


if __name__ == "__main__":
    main(sys.argv[1])
