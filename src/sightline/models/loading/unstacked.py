"""Shows experts that are stored as one tensor as tensors of their own, under the names that definitions ask for.

    stored                                                      shown
    experts.gate_up_proj [experts, 2 * size, hidden]            experts.N.gate_proj.weight, experts.N.up_proj.weight
    experts.down_proj [experts, hidden, size]                   experts.N.down_proj.weight

Granite 4 and Qwen3.5 are published so. transformers saves the latter in both ways, and keeps DeepSeek V4 so in memory.
The parts are views of the mapped file, not copies.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

from sightline.models.loading.checkpoint import Checkpoint, TensorInfo
from sightline.text.tokenizers.tokenizer import Tokenizer

MODEL_TYPES = frozenset(
    {"deepseek_v4", "granitemoehybrid", "lfm2_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"}
)
"""Families whose stacked experts have this layout: others store inputs first, or gate and up in turns."""
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


class _Part(NamedTuple):
    """A matrix inside a stored tensor."""

    stored: str
    expert: int
    rows: slice


class UnstackedCheckpoint(Checkpoint):
    """A view of another checkpoint, with a matrix for each projection of each expert."""

    def __init__(self, stored: Checkpoint) -> None:
        self._stored = stored
        self._parts: dict[str, _Part] = {}
        tensors: dict[str, TensorInfo] = {}
        for name, info in stored.tensors.items():
            if not is_stacked(name, info):
                tensors[name] = info
                continue
            for part, place in _parts_of(name, info).items():
                self._parts[part] = place
                num_rows = place.rows.stop - place.rows.start
                tensors[part] = replace(info, shape=(num_rows, info.shape[2]))
        super().__init__(stored.location, stored.config, MappingProxyType(tensors), stored.generation)

    def load_scales(self, name: str) -> torch.Tensor | None:
        self._check_name(name)
        return None if name in self._parts else self._stored.load_scales(name)

    def file_of(self, name: str) -> Path:
        self._check_name(name)
        return self._stored.file_of(self._parts[name].stored if name in self._parts else name)

    def load_tokenizer(self) -> Tokenizer:
        return self._stored.load_tokenizer()

    def _read(self, name: str) -> torch.Tensor:
        part = self._parts.get(name)
        return self._stored.load(name) if part is None else self._stored.load(part.stored)[part.expert, part.rows]

    def _read_packed(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self._stored.load_packed(name)


def with_separate_experts(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, with a matrix for each projection of each expert if it stores them as one tensor."""
    if str(checkpoint.config.get("model_type")) not in MODEL_TYPES:
        return checkpoint
    stacked = any(is_stacked(name, info) for name, info in checkpoint.tensors.items())
    return UnstackedCheckpoint(checkpoint) if stacked else checkpoint


def is_stacked(name: str, info: TensorInfo) -> bool:
    """True if the tensor holds a projection of all experts. Packed tensors are not cut."""
    return name.endswith((_GATE_UP, _DOWN)) and len(info.shape) == 3 and not info.is_quantised


def _parts_of(name: str, info: TensorInfo) -> dict[str, _Part]:
    num_experts, num_rows, _ = info.shape
    prefix = name.removesuffix(_GATE_UP).removesuffix(_DOWN) + ".experts"
    names = ("gate", "up") if name.endswith(_GATE_UP) else ("down",)
    size = num_rows // len(names)
    return {
        f"{prefix}.{expert}.{part}_proj.weight": _Part(name, expert, slice(number * size, (number + 1) * size))
        for expert in range(num_experts)
        for number, part in enumerate(names)
    }
