"""Random weights for a config: a checkpoint whose tensors are generated on the device when they are read.

For measurements, where shapes matter and values do not. Every tensor depends on its name and the seed alone. The scales
keep activations finite through any number of layers, and tokens different from each other, so that routers spread them
over the experts:

    embeddings                       1
    projections into the stream      1 / sqrt(inputs * 2 * layers): all layers together add about as much as a token has
    other projections                1 / sqrt(inputs)
    norms, and biases and sinks      exactly 1, and exactly 0
    logarithms of decay rates        exactly 0
    connections of several streams   scales are 1, and what is added to them 0
    experts of each token            in turn
    convolutions                     1 / sqrt(width)

Does not know model families: the tensors are those that a model asks for when it is built.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import MappingProxyType
from zlib import crc32

import torch
from torch import Tensor

from sightline.core.ledger import Ledger
from sightline.models.described_weights import DESCRIBED_DTYPE, load_without_memory
from sightline.models.feed_forward import TOKEN_EXPERTS
from sightline.models.loading.config_only import ConfigCheckpoint
from sightline.models.registry import define_model

_INTO_STREAM = re.compile(r"\b(o_proj|o_b_proj|out_proj|down_proj)\b")
_ZERO = ("bias", "sinks", "A_log", ".base", ".hc_base")
_ONE = (".layer_scalar", ".D", ".scale", ".hc_scale")


class RandomCheckpoint(ConfigCheckpoint):
    """The model of a config.json, with random weights and without a tokenizer."""

    def __init__(self, path: Path, device: torch.device, ledger: Ledger, seed: int = 0) -> None:
        """Reads the config. Weights are generated on `device`, each when it is loaded."""
        super().__init__(path)
        if self.packed_as is not None:
            ledger.degrade(
                "quantization_config", f"has no effect: random weights are {DESCRIBED_DTYPE}", "use a config without it"
            )
        definition = define_model(self.config, Ledger())
        self.tensors = MappingProxyType(load_without_memory(self, definition.load)[1])
        self._num_layers = len(definition.attention_specs())
        self._device = device
        self._seed = seed

    def _read(self, name: str) -> Tensor:
        if name.endswith(TOKEN_EXPERTS):
            return self._listed(name)
        made = torch.empty(self.tensors[name].shape, dtype=DESCRIBED_DTYPE, device=self._device)
        if name.endswith(_ZERO):
            return made.zero_()
        if "norm" in name or name.endswith(_ONE):
            return made.fill_(1.0)
        generator = torch.Generator(self._device).manual_seed(crc32(name.encode(), self._seed))
        return made.normal_(0.0, self._scale(name), generator=generator)

    def _listed(self, name: str) -> Tensor:
        """The experts of each token."""
        experts = f"{name.rpartition('.gate.')[0]}.experts."
        num_experts = sum(each.startswith(experts) and each.endswith("down_proj.weight") for each in self.tensors)
        vocab_size, per_token = self.tensors[name].shape
        return torch.arange(vocab_size * per_token, device=self._device).view(vocab_size, per_token) % num_experts

    def _scale(self, name: str) -> float:
        if "embed" in name:
            return 1.0
        # A matrix is stored outputs first, a stack of experts inputs first.
        num_inputs = self.tensors[name].shape[-1 if "conv" in name else 1]
        return 1.0 / math.sqrt(num_inputs * (2 * self._num_layers if _INTO_STREAM.search(name) else 1))
