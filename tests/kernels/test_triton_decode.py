"""The decode kernel against the oracle: contexts of any length, pages of any size, any number of programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sightline.kernels.triton.decode import DecodeLayer, choose_decode, decode_softmax
from sightline.kernels.triton.numbers import WARP_GROUP_ROWS
from support.case_marks import routine
from support.decode_cases import DEVICE, FP8, Case, Paged, decode, make_scratch

BF16 = torch.bfloat16
FEW_ROWS = ((3, 1), (40, 1), (0, 0))

CASES = {
    "page-1": Case(page_size=1),
    "page-7": Case(page_size=7, head_dim=24, group_size=3),
    "page-16": Case(page_size=16),
    "page-64": Case(page_size=64, group_size=1, num_kv_heads=4),
    "pages-of-several-blocks": Case(page_size=48, window=20),
    "pages-of-one-and-a-half-blocks": Case(page_size=24, window=20),
    "fewer-tiles-than-programs": Case(FEW_ROWS, num_programs=40),
    "as-many-tiles-as-programs": Case(FEW_ROWS, num_programs=6),
    "more-tiles-than-programs": Case(num_programs=3),
    "one-program": Case(num_programs=1),
    "a-tile-that-several-programs-share": Case(((200, 1),), num_kv_heads=1, num_programs=7),
    "tiles-longer-than-shares": Case(((40, 1), (60, 1), (50, 1)), num_kv_heads=4, group_size=1, num_programs=10),
    "more-parts-than-are-merged-at-once": Case(((600, 1), (3, 1), (0, 1)), group_size=1, num_programs=24, sinks=True),
    "more-heads-than-a-unit": Case(FEW_ROWS, num_kv_heads=1, group_size=20, sinks=True),
    "more-heads-than-a-unit-cut": Case(FEW_ROWS, group_size=20, sinks=True, num_programs=14),
    "window-1": Case(window=1, page_size=7),
    "window-in-a-block": Case(window=5, page_size=1, num_kv_heads=1),
    "window-of-a-block": Case(window=16),
    "window-over-blocks": Case(window=40, num_programs=14),
    "window-longer-than-rows": Case(window=1000),
    "softcap": Case(softcap=1.5),
    "sinks": Case(sinks=True),
    "everything": Case(page_size=7, head_dim=24, group_size=3, window=21, softcap=2.0, sinks=True, num_programs=14),
    "without-lse": Case(lse=False, num_programs=14),
    "bf16": Case(dtype=BF16, page_size=1),
    "bf16-everything": Case(dtype=BF16, window=21, softcap=2.0, sinks=True, num_programs=3),
    "fp16": Case(dtype=torch.float16),
    "only-empty-rows": Case(((0, 0), (0, 0))),
    "fp8": Case(cache_dtype=FP8, scales=(0.5, 0.02), page_size=7),
    "fp8-bf16-everything": Case(
        dtype=BF16, cache_dtype=FP8, scales=(0.02, 3.0), window=21, softcap=2.0, sinks=True, num_programs=14
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    routine(
        CASES,
        "more-parts-than-are-merged-at-once",
        "everything",
        "without-lse",
        "only-empty-rows",
        "fp8-bf16-everything",
    ),
)
def test_rows_of_one_new_token_equal_the_oracle(case: Case) -> None:
    decode(case).check()


@pytest.mark.parametrize("apart", ["out", "sinks", "values"])
def test_layouts_that_it_would_read_or_write_wrongly_are_refused(apart: str) -> None:
    case = Case(sinks=True)
    spec, rows, scratch = case.spec, Paged.shuffled(case).rows, make_scratch(case, case.head_dim)
    shapes = {
        "out": (case.num_tokens, spec.num_q_heads, case.head_dim),
        "sinks": (spec.num_q_heads,),
        "values": (64, spec.num_kv_heads, case.head_dim),
    }
    given = {name: torch.zeros(shape, device=DEVICE) for name, shape in shapes.items()}
    given[apart] = torch.zeros(*shapes[apart], 2, device=DEVICE).select(-1, 0)
    layer = DecodeLayer(torch.zeros(shapes["values"], device=DEVICE), given["values"], None, None, 0.1, None, None)
    q, new = (
        torch.zeros(shapes["out"], device=DEVICE),
        torch.zeros(case.num_tokens, *shapes["values"][1:], device=DEVICE),
    )
    with pytest.raises(ValueError, match="expected out and sinks without gaps, and keys and values that lie alike"):
        decode_softmax(q, (new, new), given["sinks"], layer, rows, scratch, case.config, given["out"], None)


def test_both_ways_of_recording_cuts_are_tried() -> None:
    assert CASES["fewer-tiles-than-programs"].tiles < 40
    assert CASES["as-many-tiles-as-programs"].tiles == 6
    assert CASES["more-tiles-than-programs"].tiles > 3


def test_a_merge_of_several_rounds_is_tried() -> None:
    """The long row's 38 blocks of each group of heads are more than 8 programs'."""
    case = CASES["more-parts-than-are-merged-at-once"]
    assert case.num_programs // case.tiles <= 8
    units = (38 + 2) * case.num_kv_heads
    assert 38 // -(-units // case.num_programs) > 8


def test_what_is_beyond_an_fp8_caches_range_is_its_largest_number() -> None:
    # Saturated when it is written, and seen as it was written.
    decode(Case(FEW_ROWS, cache_dtype=FP8, scales=(0.001, 0.001))).check()


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("group_size", [1, 7])
def test_chosen_configurations_compute(dtype: torch.dtype, group_size: int) -> None:
    chosen = choose_decode(80, group_size, dtype, dtype, multiprocessors=3, shared_bytes=1 << 17, overlaps=False)
    case = Case(
        ((70, 1), (3, 1)),
        head_dim=80,
        group_size=group_size,
        dtype=dtype,
        page_size=64,
        block=chosen.block,
        heads=chosen.heads,
        num_programs=chosen.num_programs,
    )
    decode(case).check()


@pytest.mark.parametrize("head_dim", [72, 80])
def test_heads_are_never_a_warp_groups(head_dim: int) -> None:
    chosen = choose_decode(head_dim, 100, BF16, BF16, multiprocessors=3, shared_bytes=1 << 17, overlaps=False)
    assert chosen.heads < WARP_GROUP_ROWS


def test_the_oracle_tells_a_window_one_too_wide() -> None:
    found, wide = decode(Case(window=5)), decode(Case(window=6))
    with pytest.raises(AssertionError):
        replace(found, out=wide.out).check()


def test_how_work_is_cut_changes_rounding_alone() -> None:
    outs = [decode(Case(FEW_ROWS, num_programs=count)).out for count in (1, 3, 12)]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], atol=2e-6, rtol=0.0)
