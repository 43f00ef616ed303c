"""The Triton indexer chooses what the oracle chooses: ties, ragged rows, shuffled pages, several parts and levels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sightline.attention.backends.torch.index_backend import TorchIndexBackend
from sightline.attention.backends.triton.index_backend import TritonIndexBackend
from sightline.attention.spec import IndexSpec
from support.case_marks import routine
from support.sparse_rig import SparseCase, check_choice

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
SPEC = IndexSpec(num_q_heads=4, head_dim=16, top_k=5)
RAGGED = SparseCase(SPEC, ((3, 1), (0, 9), (30, 1), (20, 3)))
DECODE = SparseCase(SPEC, ((4, 1), (5, 1), (40, 1), (0, 1)))


class SmallSegments(TritonIndexBackend):
    """Chooses in several levels, for few queries at a time."""

    segment = 16
    room_bytes = 128 * 4 * 6


CASES = {
    "few": SparseCase(SPEC, ((9, 2), (3, 1)), dtype=BF16, cache_dtype=FP8, padding=(1, 1), max_seq_len=16, bound=True),
    "ragged": RAGGED,
    "decode": DECODE,
    "padding": replace(RAGGED, padding=(2, 3)),
    "bf16": replace(RAGGED, dtype=BF16, page_size=16),
    "bf16-decode": replace(DECODE, dtype=BF16, page_size=128),
    "fp16": replace(RAGGED, dtype=FP16, page_size=7),
    "fp8": replace(RAGGED, dtype=BF16, cache_dtype=FP8),
    "fp8-fp32": replace(DECODE, cache_dtype=FP8, padding=(1, 1)),
    "transient": replace(RAGGED, dtype=BF16, transient=True, padding=(1, 2)),
    "transient-fp32": replace(RAGGED, transient=True),
    "bounds": replace(RAGGED, dtype=BF16, bound=True, padding=(2, 3)),
    "three heads of 24": replace(RAGGED, spec=IndexSpec(3, 24, 6), dtype=BF16),
    "not whole": replace(RAGGED, whole_numbers=False),
    "keys alone": replace(RAGGED, is_sparse=False, cache_dtype=FP8),
}


@pytest.mark.parametrize("case", routine(CASES, "bf16-decode", "few", "keys alone"))
def test_the_choice_and_the_keys_are_the_oracles(case: SparseCase) -> None:
    check_choice(case, TritonIndexBackend)


@pytest.mark.prove
@pytest.mark.parametrize("name", ["ragged", "bf16", "padding"])
def test_parts_and_levels_change_nothing(name: str) -> None:
    check_choice(replace(CASES[name], rows=((90, 2), (0, 9), (17, 1), (16, 1))), SmallSegments)


@pytest.mark.parametrize("name", ["ragged", "fp8", "transient"])
def test_torch_chooses_the_same(name: str) -> None:
    check_choice(CASES[name], TorchIndexBackend)


def test_the_rig_notices_a_different_choice() -> None:
    class OneFewer(TritonIndexBackend):
        """Chooses one token fewer."""

        def __init__(self, context: object) -> None:
            super().__init__(context)  # type: ignore[arg-type]
            self._chooser.choice = replace(self._chooser.choice, top_k=SPEC.top_k - 1)

    with pytest.raises(AssertionError):
        check_choice(CASES["few"], OneFewer)
