"""Capability rows that serve only layers with certain features, and how selection orders recurrent backends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sightline.attention.backends.fla import rows as fla_rows
from sightline.attention.backends.flashinfer import rows as flashinfer_rows
from sightline.attention.backends.registry import BUILT_IN, find, offer
from sightline.attention.backends.torch.recurrent_backend import TorchRecurrentBackend
from sightline.attention.capability import Capability, Requirement, Work, refusals
from sightline.attention.dimensions import Dimension
from sightline.attention.kinds import Feature
from sightline.attention.selection import Candidate, Offer, select_backend
from sightline.attention.spec import RecurrentSpec
from sightline.core.device import Device, DeviceKind
from sightline.core.errors import NoBackendError
from sightline.testing.conformance.domains import domains_of
from sightline.testing.conformance.rig import Subject
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.trial import Effort, Trial

HOPPER = Device(DeviceKind.CUDA, torch.device("cuda"), "a Hopper", (9, 0))
DELTA = RecurrentSpec(
    num_heads=32,
    num_key_heads=16,
    key_dim=128,
    value_dim=128,
    scale=0.1,
    delta_rule=True,
    channel_decay=False,
    unit_keys=True,
    conv_width=4,
)
KIMI = replace(DELTA, num_key_heads=32, channel_decay=True)
LIGHTNING = replace(DELTA, num_key_heads=32, delta_rule=False)
SPECS = {"gated delta": DELTA, "kimi delta": KIMI, "lightning": LIGHTNING, "mamba": replace(LIGHTNING, skip=True)}
SERVED = {
    "fla-recurrent": {"gated delta", "kimi delta", "lightning"},
    "flashinfer-recurrent": {"gated delta"},
    "triton-recurrent": set(SPECS),
}


def need(spec: RecurrentSpec) -> Requirement:
    return Requirement(spec, HOPPER, torch.bfloat16, torch.bfloat16, page_size=16)


def here(candidates: Iterable[Candidate] = BUILT_IN) -> tuple[Candidate, ...]:
    """The candidates as if every library were installed."""

    def installed(rows: tuple[Capability, ...]) -> Any:
        return lambda: tuple(replace(row, package=None) for row in rows)

    return tuple(replace(each, rows=installed(each.rows())) for each in candidates)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", SERVED)
def test_a_library_serves_the_layers_that_it_has_an_operation_for(name: str, spec: str) -> None:
    rows = find(name, here()).rows()
    assert any(not refusals(row, need(SPECS[spec])) for row in rows) == (spec in SERVED[name])


def libraries(*, are_proven: bool) -> Offer:
    """What serves by default, before or after a card has passed the adapters of both libraries."""
    fla = [
        replace(
            row, package=None, ranks=fla_rows.ranks(is_faster=Feature.DELTA_RULE in row.features, is_proven=are_proven)
        )
        for row in fla_rows.RECURRENT_ROWS
    ]
    changed: dict[str, dict[str, Any]] = {
        "fla-recurrent": {"rows": lambda: tuple(fla)},
        "flashinfer-recurrent": {"by_default": are_proven},
    }
    candidates = tuple(replace(each, **changed.get(each.name, {})) for each in here())
    return offer(candidates, None)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("work", Work)
def test_our_own_kernels_serve_until_a_library_is_proven(spec: str, work: Work) -> None:
    chosen = select_backend(libraries(are_proven=False), need(SPECS[spec]), "group", work=work)
    assert chosen.candidate.name == "triton-recurrent"


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("work", Work)
def test_the_fastest_proven_library_serves_prompts(spec: str, work: Work) -> None:
    faster = {"gated delta": "flashinfer-recurrent", "kimi delta": "fla-recurrent"} if work is Work.PREFILL else {}
    chosen = select_backend(libraries(are_proven=True), need(SPECS[spec]), "group", work=work)
    assert chosen.candidate.name == faster.get(spec, "triton-recurrent")


@pytest.mark.parametrize("name", ["fla-recurrent", "flashinfer-recurrent"])
def test_a_library_that_is_asked_for_serves_all_kinds_of_work(name: str) -> None:
    chosen = {select_backend(offer(here(), name), need(DELTA), "group", work=work).candidate.name for work in Work}
    assert chosen == {name}
    with pytest.raises(NoBackendError, match="lacks skip"):
        select_backend(offer(here(), name), need(replace(DELTA, skip=True)), "group")


def test_a_layer_without_the_feature_is_refused_with_the_reason() -> None:
    [row] = flashinfer_rows.RECURRENT_ROWS
    reasons = refusals(replace(row, package=None), need(LIGHTNING))
    assert reasons == ("serves only layers with delta-rule",)


def test_only_features_that_a_row_has_can_be_required() -> None:
    [row] = flashinfer_rows.RECURRENT_ROWS
    with pytest.raises(ValueError, match="expected only_with to be declared features"):
        replace(row, features=frozenset())
    with pytest.raises(ValueError, match="expected only_with to be declared features"):
        replace(row, features=row.features | {Feature.WINDOW}, only_with=frozenset({Feature.WINDOW}))


def test_the_kit_tries_no_layer_without_the_feature() -> None:
    row = replace(fla_rows.RECURRENT_ROWS[1], package=None)
    subject = Subject("kimi", TorchRecurrentBackend, row, HOPPER)
    samples = Samples()
    assert domains_of(subject, samples).values[Dimension.FEATURES] == ("channel-decay+delta-rule",)
    trial = Trial(subject, Effort.QUICK, samples)
    tried = [trial.plain, trial.spec(128, 2, 3), trial.sized(128)]
    assert all(each.delta_rule and each.channel_decay and not each.skip for each in tried)
