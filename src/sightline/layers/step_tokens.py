"""The tokens of a step, for layers that read them and not only what the network made of them."""

from __future__ import annotations

import torch

from sightline.layers.scratch import Scratch


class TokenBuffers:
    """The step's tokens, which the network copies before the first layer. They stay until the end of the step."""

    def __init__(self, scratch: Scratch) -> None:
        self.tokens = scratch.take_rows("step.tokens", 1, torch.int64).view(-1)
        """[num_tokens] int64."""
