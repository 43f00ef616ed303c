"""Tiny models with recurrent layers beside others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedModel

from support.tiny_kimi import KIMI
from support.tiny_mamba import MAMBA_HYBRIDS
from support.tiny_models import _common, with_weights
from support.tiny_qwen_hybrid import QWEN_HYBRID

HYBRIDS: dict[str, Callable[[], PreTrainedModel]] = {
    family: partial(make, _common()) for family, make in {**QWEN_HYBRID, **KIMI, **MAMBA_HYBRIDS}.items()
}
ROUTINE = ("qwen3_next", "kimi_linear")
"""The families of every run: a decay per head beside softmax attention, and one per channel beside latents."""


def make_hybrid(family: str) -> PreTrainedModel:
    """A model with weights of a scale at which every feature matters."""
    torch.manual_seed(11)
    return with_weights(HYBRIDS[family]().eval())
