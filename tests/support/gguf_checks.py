"""What a GGUF file is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from sightline.core.ledger import Ledger
from sightline.models.loading.checkpoint import Checkpoint
from sightline.models.loading.opening import open_checkpoint


def opened(path: Path) -> Checkpoint:
    ledger = Ledger()
    checkpoint = open_checkpoint(path, ledger)
    assert ledger.degradations == ()
    return checkpoint


@contextmanager
def mapped_plainly() -> Iterator[None]:
    """Gives whoever maps a file a plain array: gguf's reader slices it for each word of a vocabulary, and a slice of
    `memmap` takes three times as long."""
    mapped = np.memmap
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", lambda *where, **how: mapped(*where, **how).view(np.ndarray))
        yield


def loaded_by_transformers(path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Config and weights as transformers reads them. `from_pretrained` does the same, but asks for accelerate."""
    with mapped_plainly():
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        return config, load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]


def assert_same_weights(checkpoint: Checkpoint, expected: Mapping[str, torch.Tensor]) -> None:
    """Names, shapes and values, bit for bit."""
    assert set(checkpoint.tensors) == set(expected)
    for name, weight in expected.items():
        info = checkpoint.tensors[name]
        loaded = checkpoint.load(name)
        assert info.shape == tuple(weight.shape) == tuple(loaded.shape)
        assert info.dtype == loaded.dtype == torch.float32
        assert loaded.is_contiguous()
        assert torch.equal(loaded, weight.to(torch.float32)), name
