"""What transformers would generate greedily, at the price of a few forward passes.

A draft only says where to look: what comes of it is the model's own choice after its own choices, whatever the draft.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from transformers import PreTrainedModel


def greedy_tokens(
    model: PreTrainedModel, prompt: Sequence[int], draft: Sequence[int], num_new: int, eos: Collection[int]
) -> tuple[int, ...]:
    """The `num_new` tokens that the model chooses after the prompt, or fewer, up to the first that ends it."""
    chosen: list[int] = []
    while True:
        begun = len(chosen)
        tokens = [*prompt, *chosen, *draft[begun:]]
        with torch.inference_mode():
            best = model(torch.tensor([tokens])).logits[0, len(prompt) + begun - 1 :].argmax(-1).tolist()
        for place, token in enumerate(best, start=begun):
            chosen.append(token)
            if len(chosen) == num_new or token in eos:
                return tuple(chosen)
            if place >= len(draft) or token != draft[place]:
                break
