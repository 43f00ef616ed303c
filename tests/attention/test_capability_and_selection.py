"""Capability rows are the only ground for choosing a backend, and every refusal says why."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from sightline.attention.backends import registry
from sightline.attention.backends.reference.backend import ReferenceBackend
from sightline.attention.backends.registry import BUILT_IN
from sightline.attention.capability import (
    ANY,
    Capability,
    HostLengths,
    Ranks,
    Requirement,
    hindrances,
    lacks_package,
    refusals,
)
from sightline.attention.contract import AttentionBackend, SoftmaxInputs
from sightline.attention.kinds import LATENT_ONLY, RECURRENT_ONLY, Feature, SpecKind
from sightline.attention.selection import Candidate, Selection, select_backend
from sightline.attention.spec import LatentSpec, SoftmaxSpec
from sightline.core import extensions
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
    group_sizes=frozenset({1, 2}),
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

    return Candidate.of(name, Stub, "a test", by_default=by_default)


def select(candidates: Sequence[Candidate], need: Requirement, requested: str | None = None) -> Selection:
    return select_backend(registry.offer(candidates, requested), need, "group7")


def refusal_text(candidates: Sequence[Candidate], need: Requirement, requested: str | None = None) -> str:
    with pytest.raises(NoBackendError) as caught:
        select(candidates, need, requested)
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
    "group size": (
        ROW,
        replace(NEED, spec=replace(PLAIN, num_kv_heads=1)),
        "does not list 4 query heads on a key head",
    ),
    "page size": (ROW, replace(NEED, page_size=32), "does not list page size 32"),
    "feature of the spec": (ROW, replace(NEED, spec=replace(PLAIN, window=5)), "lacks window"),
    "feature of the engine": (ROW, replace(NEED, extra_features=frozenset({Feature.LSE})), "lacks lse"),
}


@pytest.mark.parametrize(("row", "need", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_each_thing_that_does_not_fit_is_the_one_reason_given(row: Capability, need: Requirement, reason: str) -> None:
    assert refusals(row, need) == (reason,)


@pytest.mark.parametrize(
    ("field", "value"), [("page_sizes", 16), ("head_dims", {64}), ("features", ANY), ("dtypes", [])]
)
def test_a_row_that_is_not_made_of_sets_says_which_field(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"expected {field} to be a frozenset.*, got "):
        replace(ROW, **{field: value})  # type: ignore[arg-type]


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


@pytest.mark.parametrize("field", ["compute_capabilities", "cache_dtypes", "head_dims", "group_sizes", "page_sizes"])
def test_any_serves_every_value_of_its_column_and_of_no_other(field: str) -> None:
    row = replace(CUDA_ROW, head_dims=frozenset({64}))
    spec = replace(PLAIN, head_dim=97, num_kv_heads=1)
    need = Requirement(spec, SM120, torch.float32, torch.float16, page_size=3)
    assert len(refusals(row, need)) == 5
    changes: dict[str, Any] = {field: ANY}
    assert len(refusals(replace(row, **changes), need)) == 4


def test_a_requirement_needs_the_features_of_the_spec_and_of_the_engine() -> None:
    need = replace(NEED, spec=replace(PLAIN, window=3), extra_features=frozenset({Feature.TREE_MASK}))
    assert need.features == {Feature.WINDOW, Feature.TREE_MASK}


def test_the_first_backend_that_serves_is_chosen_and_the_others_say_why_not() -> None:
    other_dtype = replace(ROW, dtypes=frozenset({torch.float16}))
    chosen = select([candidate("half", other_dtype), candidate("first", ROW), candidate("second", ROW)], NEED)
    assert chosen.candidate.name == "first"
    assert chosen.capability == ROW
    assert chosen.refused == (
        ("half", ("computes in torch.float16, not torch.float32",)),
        ("second", ("first comes first",)),
    )


def test_the_row_that_fits_is_the_one_reported() -> None:
    half, full = replace(ROW, dtypes=frozenset({torch.float16})), replace(ROW, features=frozenset(Feature))
    assert select([candidate("both", half, full)], NEED).capability is full


def test_a_backend_that_serves_only_by_name_is_never_chosen_without_it() -> None:
    by_name = candidate("oracle", ROW, by_default=False)
    chosen = select([by_name, candidate("usual", ROW)], NEED)
    assert chosen.candidate.name == "usual"
    assert chosen.refused == (("oracle", ("serves only when asked for by name",)),)
    assert select([by_name], NEED, "oracle").candidate is by_name


def test_an_error_where_every_backend_serves_only_by_name_lists_them() -> None:
    text = refusal_text([candidate("oracle", ROW, by_default=False)], NEED)
    assert "oracle: serves only when asked for by name" in text


def test_an_explicit_choice_wins_over_the_order() -> None:
    chosen = select([candidate("first", ROW), candidate("second", ROW)], NEED, "second")
    assert chosen.candidate.name == "second"
    assert chosen.refused == (("first", ("second was asked for",)),)


def test_an_explicit_choice_is_never_replaced_and_the_error_names_every_backend() -> None:
    candidates = [candidate("able", replace(ROW, features=frozenset(Feature))), candidate("asked", ROW)]
    text = refusal_text(candidates, replace(NEED, spec=replace(PLAIN, window=4, sinks=True)), "asked")
    assert "expected an attention backend for prefill of group7 (softmax, sinks, window, torch.float32" in text
    assert "head dimension 64, page size 16, cpu), got none:" in text
    assert "\n  asked: lacks sinks, window\n" in text
    assert text.endswith("\n  not asked for: able\nAsk for able, or for none by name.")


def test_an_error_suggests_none_that_serves_only_by_name_and_does_not_read_its_rows() -> None:
    def broken() -> tuple[Capability, ...]:
        raise ConfigError("another package would have to be imported")

    foreign = replace(candidate("foreign", by_default=False), rows=broken)
    text = refusal_text([candidate("asked"), candidate("able", ROW), foreign], NEED, "asked")
    assert text.endswith("\n  not asked for: able, foreign\nAsk for able, or for none by name.")


def test_the_nearest_to_an_explicit_choice_is_that_choice() -> None:
    candidates = [candidate("unable", replace(ROW, features=frozenset({Feature.LSE}))), candidate("asked", ROW)]
    text = refusal_text(candidates, replace(NEED, spec=replace(PLAIN, window=4)), "asked")
    assert "The nearest is asked:" in text


def test_what_another_setting_would_mend_is_nearer_than_what_another_machine_would() -> None:
    elsewhere = candidate("elsewhere", CUDA_ROW)
    text = refusal_text([elsewhere, candidate("here", replace(ROW, page_sizes=frozenset({3})))], NEED)
    assert "The nearest is here:" in text
    gone = candidate("gone", replace(ROW, package="a_package_that_is_not_there"))
    other = replace(ROW, page_sizes=frozenset({3}), head_dims=frozenset({8}))
    assert "The nearest is here:" in refusal_text([gone, candidate("here", other)], NEED)


def test_what_another_setting_would_mend_is_nearer_than_another_kind_of_attention() -> None:
    latent = replace(ROW, spec_kinds=frozenset({SpecKind.LATENT}))
    other = replace(ROW, page_sizes=frozenset({3}), head_dims=frozenset({8}))
    assert "The nearest is here:" in refusal_text([candidate("latent", latent), candidate("here", other)], NEED)
    text = refusal_text([candidate("both", latent, other)], NEED)
    assert "  both: does not list head dimension 64; does not list page size 16\n" in text


def test_of_rows_as_near_as_each_other_the_reasons_are_those_of_the_one_that_computes_so() -> None:
    half = replace(ROW, dtypes=frozenset({torch.float16}))
    full = replace(ROW, dtypes=frozenset({torch.float32}), page_sizes=frozenset({3}))
    assert "  both: does not list page size 16\n" in refusal_text([candidate("both", half, full)], NEED)


def test_faster_kernels_for_such_devices_that_do_not_serve_are_told_apart() -> None:
    fast = replace(CUDA_ROW, ranks=Ranks(prefill=5), page_sizes=frozenset({64}))
    portable = replace(CUDA_ROW, compute_capabilities=ANY)
    card = replace(NEED, device=replace(SM120, compute_capability=(9, 0)))
    latent = replace(fast, spec_kinds=frozenset({SpecKind.LATENT}))
    slower = replace(fast, ranks=Ranks())
    others = [candidate("fast", fast), candidate("latent", latent), candidate("slower", slower)]
    selection = select([*others, candidate("portable", portable)], card)
    assert selection.candidate.name == "portable"
    assert [name for name, _ in selection.forgone] == ["fast"]
    assert select([candidate("fast", fast), candidate("here", ROW)], NEED).forgone == ()


def test_kernels_that_a_choice_goes_without_are_those_of_a_higher_rank_than_its_own() -> None:
    def ranked(rank: int, **changes: Any) -> Capability:
        return replace(ROW, ranks=Ranks(prefill=rank), **changes)

    elsewhere = frozenset({64})
    others = [candidate(f"rank{rank}", ranked(rank, page_sizes=elsewhere)) for rank in (1, 2, 3)]
    selection = select([*others, candidate("chosen", ranked(2))], NEED)
    assert selection.candidate.name == "chosen"
    assert selection.forgone == (("rank3", ("does not list page size 16",)),)


def test_an_unknown_choice_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="expected an attention backend out of first, second, got 'third'") as caught:
        select([candidate("first", ROW), candidate("second", ROW)], NEED, "third")
    assert not isinstance(caught.value, NoBackendError)


def test_no_backend_at_all_lists_each_with_all_its_reasons_and_the_nearest() -> None:
    need = replace(NEED, dtype=torch.float16, spec=replace(PLAIN, window=4))
    far = candidate("far", ROW)
    near = candidate("near", replace(ROW, features=frozenset({Feature.WINDOW})))
    lines = refusal_text([far, near], need).splitlines()
    assert lines[1:] == [
        "  far: computes in torch.bfloat16, torch.float32, not torch.float16; lacks window",
        "  near: computes in torch.bfloat16, torch.float32, not torch.float16",
        "The nearest is near: mend what it says, or choose another device or dtype.",
    ]


def test_a_backend_of_several_rows_gives_the_reasons_of_the_nearest_row() -> None:
    far = replace(ROW, dtypes=frozenset({torch.float16}), page_sizes=frozenset({1}))
    near = replace(ROW, page_sizes=frozenset({64}))
    assert "  both: does not list page size 16\n" in refusal_text([candidate("both", far, near)], NEED)


def test_a_backend_without_rows_says_so() -> None:
    far = replace(ROW, page_sizes=frozenset({3}), head_dims=frozenset({8}))
    text = refusal_text([candidate("empty"), candidate("far", far)], NEED)
    assert "  empty: declares no capability\n" in text
    assert "The nearest is far:" in text


@pytest.mark.parametrize("feature", FEATURED)
def test_a_feature_that_no_backend_has_is_an_error_that_names_it(feature: Feature) -> None:
    need = replace(NEED, spec=replace(PLAIN, **FEATURED[feature]))
    others = replace(ROW, features=frozenset(Feature) - {feature})
    for requested in (None, "lacking"):
        assert f"  lacking: lacks {feature.value}\n" in refusal_text([candidate("lacking", others)], need, requested)
    able = candidate("able", replace(ROW, features=frozenset({feature})))
    assert select([candidate("lacking", others), able], need).candidate is able


def test_a_missing_package_is_named() -> None:
    gone = candidate("gone", replace(ROW, package="a_package_that_is_not_there"))
    assert "  gone: package a_package_that_is_not_there is not installed\n" in refusal_text([gone], NEED)
    told = replace(gone, brings="speed; pip install it")
    assert "is not installed (it brings speed; pip install it)\n" in refusal_text([told], NEED)


def test_what_a_package_brings_is_not_told_where_it_is_there() -> None:
    there = replace(candidate("there", replace(ROW, package="torch")), brings="speed; pip install it")
    assert "  there: does not list page size 32\n" in refusal_text([there], replace(NEED, page_size=32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_real_backends_serve_every_feature_on_a_cpu_and_the_oracle_only_by_name(dtype: torch.dtype) -> None:
    spec = replace(PLAIN, window=4, softcap=2.0, sinks=True)
    features = frozenset(Feature) - RECURRENT_ONLY - LATENT_ONLY - {Feature.BATCH_INVARIANT}
    need = Requirement(spec, CPU, dtype, dtype, page_size=5, extra_features=features)
    assert select(BUILT_IN, need).candidate.name == "numba"
    for name in ("numba", "torch", "reference"):
        assert select(BUILT_IN, need, name).candidate is registry.find(name, BUILT_IN)


def test_a_row_that_does_not_depend_on_its_neighbours_is_promised_by_the_oracle_alone() -> None:
    need = replace(NEED, extra_features=frozenset({Feature.BATCH_INVARIANT}))
    text = refusal_text(BUILT_IN, need)
    assert "  torch: lacks batch-invariant\n" in text
    assert "  reference: serves only when asked for by name\n" in text
    assert select(BUILT_IN, need, "reference").candidate.load() is ReferenceBackend


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_the_portable_backends_serve_every_card(capability: tuple[int, int]) -> None:
    card = replace(SM120, compute_capability=capability)
    for name in ("torch", "reference"):
        assert select(BUILT_IN, replace(NEED, device=card), name).candidate.name == name


def test_the_default_order_is_the_order_of_the_list() -> None:
    offered = registry.offer(BUILT_IN, None)
    assert offered.candidates == tuple(each for each in BUILT_IN if each.by_default)
    assert {each.name for each in offered.passed_over} == {each.name for each in BUILT_IN if not each.by_default}


def test_a_doubt_about_a_row_that_serves_is_a_reason_like_any_other() -> None:
    doubted = {"first"}

    def doubt(each: Candidate, row: Capability, need: Requirement) -> tuple[str, ...]:
        return ("is not proven here",) if each.name in doubted else ()

    offered = registry.offer([candidate("first", ROW), candidate("second", ROW)], None)
    chosen = select_backend(offered, NEED, "group0", doubt)
    assert chosen.candidate.name == "second"
    assert chosen.refused == (("first", ("is not proven here",)),)
    doubted.add("second")
    with pytest.raises(NoBackendError, match="first: is not proven here\n  second: is not proven here"):
        select_backend(offered, NEED, "group0", doubt)


def test_a_backend_that_nobody_asks_for_is_never_loaded() -> None:
    loaded = []

    def watched(name: str, *, by_default: bool) -> Candidate:
        def load() -> type[AttentionBackend[SoftmaxSpec, SoftmaxInputs]]:
            loaded.append(name)
            return candidate(name, ROW).load()

        return Candidate(name, by_default, "a test", load, lambda: (ROW,))

    candidates = [watched("first", by_default=True), watched("second", by_default=True)]
    candidates.append(watched("third", by_default=False))
    select(candidates, NEED)
    select(candidates, NEED, "third")
    assert loaded == [], "selection reads rows; only what is chosen is loaded, and not by it"


@dataclass(frozen=True)
class FakeEntryPoint:
    """As much of an entry point as discovery uses."""

    name: str
    loads: object
    dist: SimpleNamespace | None
    value: str = "package.module:Thing"

    def load(self) -> object:
        if isinstance(self.loads, Exception):
            raise self.loads
        return self.loads


def install(monkeypatch: pytest.MonkeyPatch, *entries: FakeEntryPoint) -> None:
    def entry_points(*, group: str) -> tuple[FakeEntryPoint, ...]:
        return entries if group == registry.ENTRY_POINT_GROUP else ()

    monkeypatch.setattr(extensions, "entry_points", entry_points)


def entry(name: str, loads: object, distribution: str | None = "fast-attention") -> FakeEntryPoint:
    return FakeEntryPoint(name, loads, None if distribution is None else SimpleNamespace(name=distribution))


def test_an_installed_packages_backend_is_found_and_serves_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = candidate("unused", ROW).load()
    install(monkeypatch, entry("fast", backend))
    candidates = registry.installed()
    assert [each.name for each in candidates] == [*(each.name for each in BUILT_IN), "fast"]
    assert candidates[-1].distribution == "fast-attention"
    assert "fast" not in [each.name for each in registry.offer(candidates, None).candidates]
    chosen = select(candidates, NEED, "fast")
    assert (chosen.candidate.name, chosen.candidate.load()) == ("fast", backend)


def test_an_installed_packages_backend_is_imported_only_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, entry("broken", ImportError("no such symbol")))
    candidates = registry.installed()
    assert select(candidates, NEED).candidate.name == "numba"
    with pytest.raises(ConfigError, match="got ImportError: no such symbol; mend or uninstall fast-attention"):
        select(candidates, NEED, "broken")


def test_two_backends_of_one_name_are_an_error_that_names_both_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, entry("torch", None))
    with pytest.raises(ConfigError, match="named 'torch', got one of sightline and one of fast-attention"):
        registry.installed()
    install(monkeypatch, entry("twin", None, "one"), entry("twin", None, None))
    with pytest.raises(ConfigError, match="named 'twin', got one of one and one of an unknown package"):
        registry.installed()


@pytest.mark.parametrize("thing", [Candidate, "a string", ReferenceBackend.plan])
def test_an_entry_point_that_is_no_backend_class_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, thing: object
) -> None:
    install(monkeypatch, entry("odd", thing))
    message = (
        "expected package.module:Thing of fast-attention, registered as attention backend 'odd', to be a subclass of"
    )
    with pytest.raises(ConfigError, match=message):
        select(registry.installed(), NEED, "odd")


def test_an_unknown_name_lists_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, entry("fast", ReferenceBackend))
    with pytest.raises(ConfigError, match=r"out of .*torch.*, fast, got 'slow'"):
        registry.offer(registry.installed(), "slow")


def test_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_parent" / "inner").mkdir(parents=True)
    (tmp_path / "broken_parent" / "__init__.py").write_text("raise ImportError('undefined symbol')\n")
    (tmp_path / "broken_parent" / "inner" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [lacks_package(replace(ROW, package=name)) for name in ("broken_parent.inner", "broken_parent.other")]
    assert found == [False, True]
    assert "broken_parent" not in sys.modules


def test_latent_rows_say_which_heads_they_can_make_from_entries() -> None:
    latent = LatentSpec(16, 512, 64, 128, 128, 0.1)
    row = replace(
        ROW,
        spec_kinds=frozenset({SpecKind.LATENT}),
        head_dims=frozenset({576}),
        group_sizes=ANY,
        expanded_dims=frozenset({(192, 128)}),
    )
    assert refusals(row, replace(NEED, spec=latent)) == ()
    [reason] = refusals(row, replace(NEED, spec=replace(latent, nope_dim=192, value_dim=256)))
    assert "(256, 256)" in reason


def test_a_library_that_is_there_but_broken_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "sightline.attention.backends.flashinfer.backend"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"expected flashinfer, which backend 'flashinfer' computes with.*mend"):
        registry.find("flashinfer", BUILT_IN).load()


@pytest.mark.parametrize(
    ("changes", "told"), [({"window": 0}, "window of at least 1"), ({"softcap": 0.0}, "softcap above 0")]
)
def test_a_spec_that_no_kernel_could_mean_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(PLAIN, **changes)


def test_each_reason_has_the_remedy_that_removes_it_and_what_the_model_is_has_none() -> None:
    row = replace(CUDA_ROW, head_dims=frozenset({64}), package="surely_missing", devices=frozenset({DeviceKind.CUDA}))
    need = replace(NEED, device=SM120, page_size=32, dtype=torch.float16, spec=replace(PLAIN, head_dim=104))
    assert dict(hindrances(row, need)) == {
        "package surely_missing is not installed": "install surely_missing",
        "does not list compute capability (12, 0)": "use a GPU of compute capability 9.0 or 10.0",
        "computes in torch.bfloat16, torch.float32, not torch.float16": "use the dtype bfloat16, float32",
        "does not list head dimension 104": "",
        "does not list page size 32": "use the page size 16",
    }
    assert "does not list page size 32" not in dict(hindrances(row, replace(need, page_size=16)))


def test_a_feature_that_only_settings_need_has_a_remedy_and_one_of_the_model_has_none() -> None:
    extra = replace(NEED, extra_features=frozenset({Feature.TREE_MASK}))
    assert dict(hindrances(ROW, extra)) == {"lacks tree-mask": "leave out the settings that need tree-mask"}
    assert dict(hindrances(ROW, replace(NEED, spec=replace(PLAIN, sinks=True)))) == {"lacks sinks": ""}


def test_a_device_that_is_not_here_has_every_package() -> None:
    row = replace(ROW, package="surely_missing")
    assert refusals(row, NEED) == ("package surely_missing is not installed",)
    assert refusals(row, replace(NEED, device=replace(CPU, is_here=False))) == ()
