"""The latent decode kernel against the oracle: every head reads the same entries, whose values are their latents."""

from __future__ import annotations

import pytest
import torch

from sightline.kernels.triton.latent_decode import choose_latent_decode
from support.case_marks import routine
from support.decode_cases import FP8, Case, decode_latents

BF16 = torch.bfloat16

CASES = {
    "page-1": Case(page_size=1, group_size=4),
    "page-7": Case(page_size=7, head_dim=24, rope_dim=4, group_size=5),
    "page-16": Case(page_size=16, group_size=6),
    "page-64": Case(page_size=64, group_size=6),
    "more-heads-than-a-unit": Case(group_size=40),
    "fewer-tiles-than-programs": Case(head_dim=40, group_size=4, num_programs=14),
    "more-tiles-than-programs": Case(group_size=20, num_programs=3),
    "more-parts-than-are-merged-at-once": Case(((600, 1), (3, 1)), group_size=2, num_programs=15),
    "one-program": Case(group_size=4, num_programs=1),
    "without-lse": Case(group_size=4, lse=False, num_programs=14),
    "second-half-not-full": Case(head_dim=20, rope_dim=4, group_size=5),
    "first-half-not-full": Case(head_dim=12, rope_dim=4, group_size=5, num_programs=14),
    "long-heads": Case(((33, 1), (0, 0), (7, 1)), head_dim=136, rope_dim=16, group_size=2, num_programs=7),
    "bf16": Case(dtype=BF16, head_dim=40, group_size=6, num_programs=14),
    "fp16": Case(dtype=torch.float16, head_dim=32, group_size=6),
    "only-empty-rows": Case(((0, 0),), group_size=4),
    "fp8": Case(cache_dtype=FP8, head_dim=40, scales=(0.02, 1.0), group_size=4, page_size=7, num_programs=14),
    "fp8-bf16": Case(dtype=BF16, head_dim=32, cache_dtype=FP8, scales=(3.0, 1.0), group_size=6),
}


@pytest.mark.parametrize(
    "case",
    routine(
        CASES,
        "more-parts-than-are-merged-at-once",
        "without-lse",
        "only-empty-rows",
        "fp8",
    ),
)
def test_rows_of_one_new_token_equal_the_oracle(case: Case) -> None:
    decode_latents(case).check()


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("num_heads", [3, 40])
def test_chosen_configurations_compute(dtype: torch.dtype, num_heads: int) -> None:
    chosen = choose_latent_decode(32, 8, num_heads, dtype, multiprocessors=4, shared_bytes=1 << 17, overlaps=False)
    case = Case(
        ((70, 1), (3, 1)),
        head_dim=32,
        group_size=num_heads,
        dtype=dtype,
        page_size=64,
        block=chosen.block,
        heads=chosen.heads,
        num_programs=chosen.num_programs,
    )
    decode_latents(case).check()
