"""Shows the part of a checkpoint that one rank loads. Tensors of other ranks are not there; cut ones have their part's
shape, and nothing else of the file is read.

A quantised tensor that is cut across its first dimension stays in its packed form. Cut in another way, it is decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from sightline.kernels.block_weights import BlockWeights
from sightline.kernels.coded_weights import CodedWeights
from sightline.kernels.packed_weights import WeightForm
from sightline.models.loading.checkpoint import Checkpoint, TensorInfo
from sightline.models.parts import TensorCut
from sightline.text.tokenizers.tokenizer import Tokenizer


class PartCheckpoint(Checkpoint):
    """A view of another checkpoint."""

    def __init__(self, stored: Checkpoint, cuts: Mapping[str, TensorCut]) -> None:
        """`cuts` may name tensors that are not stored, such as biases."""
        self._stored = stored
        self._cuts = {name: cut for name, cut in cuts.items() if name in stored.tensors}
        tensors = {
            name: self._info(name, info)
            for name, info in stored.tensors.items()
            if name not in self._cuts or self._cuts[name].is_shown
        }
        super().__init__(stored.location, stored.config, MappingProxyType(tensors), stored.generation)

    def _info(self, name: str, stored: TensorInfo) -> TensorInfo:
        cut = self._cuts.get(name)
        if cut is None:
            return stored
        packed = stored.packed if cut.keeps_form(stored.shape) else WeightForm.PLAIN
        return replace(stored, shape=cut.shape(stored.shape), blocks=None, packed=packed, codes=None)

    def load_scales(self, name: str) -> torch.Tensor | None:
        self._check_name(name)
        # The scales of a part are not known without those of the whole: its numbers are looked at instead.
        return None if name in self._cuts else self._stored.load_scales(name)

    def file_of(self, name: str) -> Path:
        self._check_name(name)
        return self._stored.file_of(name)

    def load_tokenizer(self) -> Tokenizer:
        return self._stored.load_tokenizer()

    def _read(self, name: str) -> torch.Tensor:
        stored, cut = self._stored.load(name), self._cuts.get(name)
        return stored if cut is None else cut.of(stored)

    def _read_packed(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = self._stored.load_packed(name)
        cut = self._cuts.get(name)
        return (codes, scales) if cut is None else (cut.of(codes), cut.of(scales))

    def _read_codes(self, name: str) -> CodedWeights:
        return self._stored.load_codes(name)

    def _read_blocks(self, name: str) -> BlockWeights:
        return self._stored.load_blocks(name)
