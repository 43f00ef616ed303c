"""FlashInfer's latent backend in sparse steps, over a stand-in of the library: tokens are rows, slots are pages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from sightline.attention.spec import LatentSpec
from support import fake_flashinfer, torch_kernels
from support.case_marks import routine
from support.sparse_rig import Backend, SparseCase, check_attention

NAME = "sightline.attention.backends.flashinfer.latent_backend"
SPEC = LatentSpec(num_q_heads=8, latent_dim=512, rope_dim=64, nope_dim=128, value_dim=128, scale=0.05, top_k=5)
RAGGED = SparseCase(SPEC, ((3, 1), (0, 7), (30, 1), (9, 3)), dtype=torch.bfloat16, whole_numbers=False, max_seq_len=64)
CASES = {
    "ragged": replace(RAGGED, padding=(1, 2)),
    "decode": replace(RAGGED, rows=((4, 1), (5, 1), (40, 1), (0, 1), (2, 1)), padding=(1, 1), lse=True),
    "fewer rows": replace(RAGGED, rows=((9, 1), (0, 0), (30, 1)), padding=(3, 1)),
    "transient": replace(RAGGED, rows=((0, 7), (0, 0), (0, 3)), transient=True, padding=(1, 2), lse=True),
    "dense": replace(RAGGED, is_sparse=False),
}


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    """The backend, loaded over the stand-in."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake_flashinfer.install(monkeypatch)
        torch_kernels.install(monkeypatch)
        loaded: Backend = importlib.import_module(NAME).FlashInferLatentBackend
        yield loaded
        sys.modules.pop(NAME)


@pytest.mark.parametrize("case", routine(CASES, "decode", "transient"))
def test_tokens_attend_to_what_they_chose(backend: Backend, case: SparseCase) -> None:
    check_attention(case, backend, 4e-2)


@pytest.mark.prove
def test_many_tokens_are_several_calls(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[NAME], "ABSORBED_TOKENS", 4)
    check_attention(replace(RAGGED, rows=((3, 13),)), backend, 4e-2)
