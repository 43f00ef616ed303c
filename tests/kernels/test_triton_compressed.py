"""The kernels of compressed attention against all raw tokens: states, entries, and outputs."""

from __future__ import annotations

import pytest
import torch

from support.case_marks import routine
from support.compressed_cases import Case, check

CASES = {
    "decode": Case(((0, 1), (5, 1), (7, 1), (8, 1), (30, 1)), padding=2),
    "decode-overlap": Case(((0, 1), (3, 1), (7, 1), (8, 1), (29, 1)), overlap=True, padding=1),
    "decode-chosen": Case(((0, 1), (39, 1), (70, 1)), overlap=True, top_k=5, num_programs=9),
    "decode-cut": Case(((190, 1), (3, 1)), ratio=2, num_programs=14),
    "decode-rows-without-tokens": Case(((9, 0), (15, 1), (0, 0), (31, 1)), overlap=True),
    "one-program": Case(((33, 1), (12, 1)), num_programs=1),
    "pieces-of-values": Case(((70, 1), (3, 1)), dim=32, heads=66, unit_heads=64, rope_dim=8, num_programs=9),
    "pieces-of-values-cut-anywhere": Case(((30, 3), (3, 2)), dim=32, unit_heads=64, num_programs=4),
    "guesses": Case(((11, 3), (0, 4), (30, 2)), overlap=True, kept=(0, 1, 3), padding=1),
    "guesses-chosen": Case(((41, 3), (16, 2)), overlap=True, top_k=4),
    "prompt": Case(((0, 21), (13, 19), (8, 4)), kept=(7, 30), padding=3, num_programs=3),
    "prompt-overlap": Case(((0, 21), (13, 19), (8, 5)), overlap=True, kept=(3, 8, 30, 40), num_programs=3),
    "prompt-chosen": Case(((0, 21), (33, 9)), overlap=True, top_k=3, num_programs=2),
    "pages-of-one-entry": Case(((17, 6), (40, 1)), page_size=4),
    "entries-of-several-pages": Case(((17, 9), (40, 1)), ratio=8, page_size=2),
    "window-only": Case(((0, 5), (13, 3)), has_entries=False),
    "window-only-decode": Case(((0, 1), (13, 1)), has_entries=False),
    "without-states": Case(((0, 21), (0, 1), (0, 9)), has_states=False, overlap=True, padding=1),
    "without-states-chosen": Case(((0, 21), (0, 9)), has_states=False, top_k=2),
    "odd-sizes": Case(((19, 2), (5, 3)), dim=24, window=5, ratio=3, page_size=6, heads=17, rope_dim=6),
    "bf16": Case(((0, 6), (37, 5)), dtype=torch.bfloat16, overlap=True, kept=(2,)),
    "bf16-decode": Case(((5, 1), (37, 1)), dtype=torch.bfloat16, dim=32, rope_dim=8),
}


@pytest.mark.parametrize(
    "case",
    routine(CASES, "decode-overlap", "guesses", "pieces-of-values-cut-anywhere"),
)
def test_a_step_equals_all_raw_tokens(case: Case) -> None:
    check(case)
