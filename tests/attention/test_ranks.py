"""Of several backends that serve a need, the highest in rank for the kind of rows is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sightline.attention.backends import registry
from sightline.attention.backends.torch.backend import TorchBackend
from sightline.attention.capability import Capability, Ranks, Requirement, Work
from sightline.attention.contract import AttentionBackend
from sightline.attention.selection import Candidate, Selection, select_backend
from sightline.attention.spec import SoftmaxSpec
from sightline.bench.attention.contenders import selected
from sightline.bench.attention.shapes import find_shapes
from sightline.core.device import Device, DeviceKind
from sightline.core.errors import NoBackendError

CPU = Device(DeviceKind.CPU, torch.device("cpu"), "cpu", None)
HOPPER = Device(DeviceKind.CUDA, torch.device("cuda", 0), "card", (9, 0))
NEED = Requirement(SoftmaxSpec(4, 2, 64, 0.125), CPU, torch.float32, torch.float32, page_size=16)
ROW = next(row for row in TorchBackend.capabilities if torch.float32 in row.dtypes)


def never_loaded() -> type[AttentionBackend[Any, Any]]:
    raise AssertionError("a backend was loaded to be chosen")


def ranked(name: str, *rows: Capability, by_default: bool = True) -> Candidate:
    return Candidate(name, by_default, "a test", never_loaded, lambda: rows)


def with_ranks(prefill: int = 0, decode: int = 0, few: int = 0, alone: int | None = None) -> Capability:
    return replace(ROW, ranks=Ranks(prefill, decode, few, alone))


def choose(candidates: list[Candidate], work: Work, asked: str | None = None, need: Requirement = NEED) -> Selection:
    return select_backend(registry.offer(candidates, asked), need, "group0", work=work)


FIRST = ranked("first", with_ranks(prefill=1))
SECOND = ranked("second", with_ranks(decode=5, few=5))
THIRD = ranked("third", with_ranks(few=9))
FOURTH = ranked("fourth", with_ranks(alone=12))
ALL = [FIRST, SECOND, THIRD, FOURTH]


@pytest.mark.parametrize(
    ("work", "wanted"),
    [(Work.PREFILL, "first"), (Work.DECODE, "second"), (Work.FEW, "third"), (Work.ALONE, "fourth")],
    ids=str,
)
def test_the_highest_rank_for_the_work_wins(work: Work, wanted: str) -> None:
    selection = choose(ALL, work)
    assert selection.candidate.name == wanted
    others = dict(selection.refused)
    assert others.keys() == {each.name for each in ALL} - {wanted}
    assert all(reasons == (f"{wanted} is faster at {work.value}",) for reasons in others.values())


def test_one_row_is_few_rows_to_a_backend_that_does_not_say() -> None:
    assert choose([FIRST, SECOND, THIRD], Work.ALONE).candidate.name == "third"


def test_of_equals_the_first_wins_and_the_others_are_told_so() -> None:
    equals = [ranked(name, with_ranks(decode=3)) for name in ("a", "b", "c")]
    selection = choose(equals, Work.DECODE)
    assert selection.candidate.name == "a"
    assert dict(selection.refused) == {"b": ("a comes first",), "c": ("a comes first",)}


def test_of_a_backends_rows_the_highest_is_the_one_reported() -> None:
    slow, fast = with_ranks(decode=1), with_ranks(decode=2)
    assert choose([ranked("both", slow, fast)], Work.DECODE).capability is fast


def test_a_higher_rank_that_does_not_fit_is_refused_with_its_reasons() -> None:
    elsewhere = ranked("elsewhere", replace(with_ranks(prefill=99), page_sizes=frozenset({64})))
    selection = choose([elsewhere, FIRST], Work.PREFILL)
    assert selection.candidate.name == "first"
    assert dict(selection.refused)["elsewhere"] == ("does not list page size 16",)
    with pytest.raises(NoBackendError, match="elsewhere: does not list page size 16"):
        choose([elsewhere], Work.PREFILL)


def test_a_name_wins_over_every_rank() -> None:
    assert choose(ALL, Work.FEW, "first").candidate.name == "first"
    assert choose(ALL, Work.FEW, "first, second").candidate.name == "second"


def test_a_high_rank_does_not_make_a_backend_serve_that_serves_only_by_name() -> None:
    shy = ranked("shy", with_ranks(prefill=99), by_default=False)
    selection = choose([shy, FIRST], Work.PREFILL)
    assert selection.candidate.name == "first"
    assert dict(selection.refused)["shy"] == ("serves only when asked for by name",)


def test_choosing_among_the_built_in_ones_loads_none() -> None:
    candidates = [replace(each, load=never_loaded) for each in registry.BUILT_IN]
    need = replace(NEED, device=HOPPER, dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
    for work in Work:
        assert choose(candidates, work, need=need).capability.devices >= {DeviceKind.CUDA}
        assert choose(candidates, work).candidate.name in ("torch", "numba")


def test_on_a_cpu_compiled_kernels_serve_everything_and_torch_without_them() -> None:
    candidates = [installed(each) for each in registry.BUILT_IN]
    assert {choose(candidates, work).candidate.name for work in Work} == {"numba"}
    others = [each for each in candidates if each.name != "numba"]
    assert {choose(others, work).candidate.name for work in Work} == {"torch"}


CHOSEN = {
    "gqa-256x2048": "triton",
    "gqa-64x4096": "triton",
    "gqa-1x8192": "triton",
    "mla128-128x4096": "flashinfer-latent",
    "mla128-16x32768": "flashinfer-latent",
    "mla128-32x4096": "flashinfer-latent",
    "mla128-1x8192": "triton-latent",
    "mla16-128x4096": "triton-latent",
    "mla16-8x2048": "triton-latent",
    "mla16-1x8192": "triton-latent",
    "prefill-gqa-1x8192": "flashinfer",
    "prefill-gqa-16x2048": "flashinfer",
    "prefill-mla128-1x4096": "flashinfer-latent",
    "prefill-mla16-4x4096": "flashinfer-latent",
}
"""With every library installed, on the shapes that were measured: the fastest, or as fast and planned sooner."""


def installed(candidate: Candidate) -> Candidate:
    """As it would be where its library is there."""
    rows = tuple(replace(row, package=None) for row in candidate.rows())
    return replace(candidate, load=never_loaded, rows=lambda: rows)


def test_what_was_measured_to_be_the_fastest_is_chosen_on_hopper() -> None:
    candidates = [installed(each) for each in registry.BUILT_IN]
    shapes = find_shapes(["decode", "prefill"])
    assert {shape.name: selected(candidates, shape, HOPPER) for shape in shapes} == CHOSEN


def test_ranks_are_of_no_matter_to_a_portable_backend() -> None:
    for candidate in registry.BUILT_IN:
        for row in candidate.rows():
            if {DeviceKind.CPU, DeviceKind.CUDA} <= row.devices:
                assert row.ranks == Ranks()
