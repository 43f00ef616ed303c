"""Latent backends attend to what was chosen, and to nothing else: ragged rows, shuffled pages, unused NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sightline.attention.backends.numba.latent_backend import NumbaLatentBackend
from sightline.attention.backends.torch.latent_backend import TorchLatentBackend
from sightline.attention.backends.triton import latent_backend
from sightline.attention.backends.triton.latent_backend import TritonLatentBackend
from sightline.attention.spec import LatentSpec
from sightline.core.batch import FULL
from sightline.kernels.triton.slots import find_slots
from support.case_marks import routine
from support.sparse_rig import Backend, SparseCase, check_attention

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SPEC = LatentSpec(num_q_heads=3, latent_dim=16, rope_dim=8, nope_dim=8, value_dim=12, scale=0.25, top_k=5)
RAGGED = SparseCase(SPEC, ((3, 1), (0, 7), (30, 1), (9, 3)), whole_numbers=False, max_seq_len=64)
CASES = {
    "few": replace(RAGGED, rows=((9, 2), (3, 1)), padding=(1, 2), lse=True, bound=True),
    "ragged": RAGGED,
    "decode": replace(RAGGED, rows=((4, 1), (5, 1), (40, 1), (0, 1)), padding=(1, 1)),
    "transient": replace(RAGGED, rows=((0, 7), (0, 3)), transient=True, padding=(1, 2), lse=True),
    "fp8": replace(RAGGED, cache_dtype=FP8, page_size=7, lse=True),
    "bf16": replace(RAGGED, dtype=BF16, page_size=16),
    "full": replace(RAGGED, rows=((2, 3), (0, 4)), mask=FULL, lse=True),
    "many chosen": replace(RAGGED, spec=replace(SPEC, top_k=37, num_q_heads=20), rows=((50, 1), (36, 2), (40, 3))),
}


def tolerance(case: SparseCase) -> float:
    return 2e-2 if case.dtype is BF16 else 2e-5


@pytest.mark.parametrize("case", routine(CASES, "few"))
def test_triton_attends_to_what_was_chosen(case: SparseCase) -> None:
    check_attention(case, TritonLatentBackend, tolerance(case), find_slots)


@pytest.mark.prove
def test_triton_finds_slots_for_few_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_backend, "SLOT_BYTES", 8 * 5 * 4)
    check_attention(replace(RAGGED, padding=(1, 2), lse=True), TritonLatentBackend, 2e-5)


@pytest.mark.parametrize("backend", [TorchLatentBackend, NumbaLatentBackend], ids=["torch", "numba"])
@pytest.mark.parametrize("name", ["ragged", "decode", "transient", "fp8", "full", "many chosen"])
def test_other_backends_attend_to_what_was_chosen(name: str, backend: Backend) -> None:
    check_attention(replace(CASES[name], bound=False), backend, tolerance(CASES[name]))
