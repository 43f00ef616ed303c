"""Capability rows are the only ground for choosing a backend, and every refusal says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from sightline.attention.backends.reference_backend import ReferenceBackend
from sightline.attention.backends.registry import CANDIDATES
from sightline.attention.capability import ANY, Capability, HostLengths, Requirement, refusals
from sightline.attention.selection import Candidate, select_backend
from sightline.attention.spec import Feature, SoftmaxSpec, SpecKind
from sightline.core.device import Device, DeviceKind
from sightline.core.errors import ConfigError, NoBackendError

CPU = Device(DeviceKind.CPU, torch.device("cpu"), "cpu", None)
SM120 = Device(DeviceKind.CUDA, torch.device("cuda", 0), "card", (12, 0))
PLAIN = SoftmaxSpec(num_q_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
NEED = Requirement(PLAIN, CPU, torch.float32, torch.float32, page_size=16)
ROW = Capability(
    spec_kinds=frozenset({SpecKind.SOFTMAX}),
    devices=frozenset({DeviceKind.CPU}),
    compute_capabilities=ANY,
    dtypes=frozenset({torch.float32, torch.bfloat16}),
    cache_dtypes=frozenset({torch.float32}),
    head_dims=frozenset({64, 128}),
    page_sizes=frozenset({16}),
    features=frozenset(),
    host_lengths=HostLengths.EXACT,
)
CUDA_ROW = replace(
    ROW, devices=frozenset({DeviceKind.CUDA}), compute_capabilities=frozenset({(9, 0), (10, 0)}), head_dims=ANY
)
FEATURED: dict[Feature, dict[str, Any]] = {
    Feature.WINDOW: {"window": 9},
    Feature.SOFTCAP: {"softcap": 30.0},
    Feature.SINKS: {"sinks": True},
}


def candidate(name: str, *rows: Capability, by_default: bool = True) -> Candidate:
    class Stub(ReferenceBackend):
        capabilities: ClassVar[tuple[Capability, ...]] = rows

    return Candidate(name, Stub, by_default)


def refusal_text(candidates: Sequence[Candidate], need: Requirement, requested: str | None = None) -> str:
    with pytest.raises(NoBackendError) as caught:
        select_backend(candidates, need, requested, "group7")
    return str(caught.value)


def test_a_row_that_lists_everything_refuses_nothing() -> None:
    assert refusals(ROW, NEED) == ()


REFUSED: dict[str, tuple[Capability, Requirement, str]] = {
    "package": (
        replace(ROW, package="a_package_that_is_not_there"),
        NEED,
        "package a_package_that_is_not_there is not installed",
    ),
    "spec kind": (replace(ROW, spec_kinds=frozenset()), NEED, "serves  attention, not softmax"),
    "device": (CUDA_ROW, NEED, "runs on cuda, not cpu"),
    "compute capability": (
        CUDA_ROW,
        replace(NEED, device=SM120),
        "does not list compute capability (12, 0)",
    ),
    "dtype": (
        ROW,
        replace(NEED, dtype=torch.float16),
        "computes in torch.bfloat16, torch.float32, not torch.float16",
    ),
    "cache dtype": (ROW, replace(NEED, cache_dtype=torch.bfloat16), "does not read a torch.bfloat16 cache"),
    "head dimension": (ROW, replace(NEED, spec=replace(PLAIN, head_dim=96)), "does not list head dimension 96"),
    "page size": (ROW, replace(NEED, page_size=32), "does not list page size 32"),
    "feature of the spec": (ROW, replace(NEED, spec=replace(PLAIN, window=5)), "lacks window"),
    "feature of the engine": (ROW, replace(NEED, extra_features=frozenset({Feature.LSE})), "lacks lse"),
}


@pytest.mark.parametrize(("row", "need", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_each_thing_that_does_not_fit_is_the_one_reason_given(row: Capability, need: Requirement, reason: str) -> None:
    assert refusals(row, need) == (reason,)


def test_every_reason_is_given_at_once() -> None:
    need = Requirement(
        replace(PLAIN, head_dim=96, softcap=1.0, sinks=True), CPU, torch.float16, torch.float16, page_size=1
    )
    assert [reason.split()[0] for reason in refusals(ROW, need)] == ["computes", "does", "does", "does", "lacks"]
    assert refusals(ROW, need)[-1] == "lacks sinks, softcap"


def test_an_installed_package_is_no_reason() -> None:
    assert refusals(replace(ROW, package="torch"), NEED) == ()


@pytest.mark.parametrize("listed", [(10, 0), (12, 1), (11, 9)])
def test_a_card_is_never_served_by_a_row_that_lists_another(listed: tuple[int, int]) -> None:
    row = replace(CUDA_ROW, compute_capabilities=frozenset({listed}))
    assert refusals(row, replace(NEED, device=SM120)) == ("does not list compute capability (12, 0)",)
    served = replace(SM120, compute_capability=listed)
    assert refusals(row, replace(NEED, device=served)) == ()


def test_compute_capability_is_of_no_matter_on_a_cpu() -> None:
    row = replace(CUDA_ROW, devices=frozenset(DeviceKind))
    assert refusals(row, NEED) == ()
    assert refusals(row, replace(NEED, device=SM120)) != ()


@pytest.mark.parametrize("field", ["compute_capabilities", "cache_dtypes", "head_dims", "page_sizes"])
def test_any_serves_every_value_of_its_column_and_of_no_other(field: str) -> None:
    row = replace(CUDA_ROW, head_dims=frozenset({64}))
    need = Requirement(replace(PLAIN, head_dim=97), SM120, torch.float32, torch.float16, page_size=3)
    assert len(refusals(row, need)) == 4
    changes: dict[str, Any] = {field: ANY}
    assert len(refusals(replace(row, **changes), need)) == 3


def test_a_requirement_needs_the_features_of_the_spec_and_of_the_engine() -> None:
    need = replace(NEED, spec=replace(PLAIN, window=3), extra_features=frozenset({Feature.TREE_MASK}))
    assert need.features == {Feature.WINDOW, Feature.TREE_MASK}


def test_the_first_backend_that_serves_is_chosen_and_the_others_say_why_not() -> None:
    other_dtype = replace(ROW, dtypes=frozenset({torch.float16}))
    chosen = select_backend(
        [candidate("half", other_dtype), candidate("first", ROW), candidate("second", ROW)], NEED, None, "group0"
    )
    assert chosen.candidate.name == "first"
    assert chosen.capability == ROW
    assert chosen.refused == (
        ("half", ("computes in torch.float16, not torch.float32",)),
        ("second", ("first comes first",)),
    )


def test_the_row_that_fits_is_the_one_reported() -> None:
    half, full = replace(ROW, dtypes=frozenset({torch.float16})), replace(ROW, features=frozenset(Feature))
    assert select_backend([candidate("both", half, full)], NEED, None, "group0").capability is full


def test_a_backend_that_serves_only_by_name_is_never_chosen_without_it() -> None:
    by_name = candidate("oracle", ROW, by_default=False)
    chosen = select_backend([by_name, candidate("usual", ROW)], NEED, None, "group0")
    assert chosen.candidate.name == "usual"
    assert chosen.refused == (("oracle", ("serves only when asked for by name",)),)
    assert "oracle: serves only when asked for by name" in refusal_text([by_name], NEED)
    assert select_backend([by_name], NEED, "oracle", "group0").candidate is by_name


def test_an_explicit_choice_wins_over_the_order() -> None:
    chosen = select_backend([candidate("first", ROW), candidate("second", ROW)], NEED, "second", "group0")
    assert chosen.candidate.name == "second"
    assert chosen.refused == (("first", ("second was asked for",)),)


def test_an_explicit_choice_is_never_replaced_and_the_error_names_every_backend() -> None:
    candidates = [candidate("able", replace(ROW, features=frozenset(Feature))), candidate("asked", ROW)]
    text = refusal_text(candidates, replace(NEED, spec=replace(PLAIN, window=4, sinks=True)), "asked")
    assert "expected an attention backend for group7 (softmax, sinks, window, torch.float32" in text
    assert "head dimension 64, page size 16, cpu), got none:" in text
    assert "\n  able: asked was asked for\n" in text
    assert "\n  asked: lacks sinks, window\n" in text


def test_the_nearest_to_an_explicit_choice_is_that_choice() -> None:
    candidates = [candidate("able", replace(ROW, features=frozenset(Feature))), candidate("asked", ROW)]
    text = refusal_text(candidates, replace(NEED, spec=replace(PLAIN, window=4)), "asked")
    assert "The nearest is asked:" in text


def test_an_unknown_choice_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="expected an attention backend out of first, second, got 'third'") as caught:
        select_backend([candidate("first", ROW), candidate("second", ROW)], NEED, "third", "group0")
    assert not isinstance(caught.value, NoBackendError)


def test_no_backend_at_all_lists_each_with_all_its_reasons_and_the_nearest() -> None:
    need = replace(NEED, dtype=torch.float16, spec=replace(PLAIN, window=4))
    far = candidate("far", ROW)
    near = candidate("near", replace(ROW, features=frozenset({Feature.WINDOW})))
    lines = refusal_text([far, near], need).splitlines()
    assert lines[1:] == [
        "  far: computes in torch.bfloat16, torch.float32, not torch.float16; lacks window",
        "  near: computes in torch.bfloat16, torch.float32, not torch.float16",
        "The nearest is near: remove what it refuses, or choose another device or dtype.",
    ]


def test_a_backend_of_several_rows_gives_the_reasons_of_the_nearest_row() -> None:
    far = replace(ROW, dtypes=frozenset({torch.float16}), page_sizes=frozenset({1}))
    near = replace(ROW, page_sizes=frozenset({64}))
    assert "  both: does not list page size 16\n" in refusal_text([candidate("both", far, near)], NEED)


def test_a_backend_without_rows_says_so() -> None:
    assert "  empty: declares no capability\n" in refusal_text([candidate("empty")], NEED)


@pytest.mark.parametrize("feature", FEATURED)
def test_a_feature_that_no_backend_has_is_an_error_that_names_it(feature: Feature) -> None:
    need = replace(NEED, spec=replace(PLAIN, **FEATURED[feature]))
    others = replace(ROW, features=frozenset(Feature) - {feature})
    for requested in (None, "lacking"):
        assert f"  lacking: lacks {feature.value}\n" in refusal_text([candidate("lacking", others)], need, requested)
    able = candidate("able", replace(ROW, features=frozenset({feature})))
    assert select_backend([candidate("lacking", others), able], need, None, "group0").candidate is able


def test_a_missing_package_is_named() -> None:
    gone = candidate("gone", replace(ROW, package="a_package_that_is_not_there"))
    assert "  gone: package a_package_that_is_not_there is not installed\n" in refusal_text([gone], NEED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_real_backends_serve_every_feature_on_a_cpu_and_the_oracle_only_by_name(dtype: torch.dtype) -> None:
    spec = replace(PLAIN, window=4, softcap=2.0, sinks=True)
    need = Requirement(spec, CPU, dtype, dtype, page_size=5, extra_features=frozenset(Feature))
    assert select_backend(CANDIDATES, need, None, "group0").candidate.name == "torch"
    for each in CANDIDATES:
        assert select_backend(CANDIDATES, need, each.name, "group0").candidate is each


def test_the_real_backends_refuse_a_card_that_they_do_not_list() -> None:
    text = refusal_text(CANDIDATES, replace(NEED, device=SM120))
    assert all(f"  {each.name}: " in text for each in CANDIDATES)
