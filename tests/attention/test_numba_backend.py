"""The compiled CPU backend passes the kit, on rows narrowed to what is compiled and computed in a minute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

pytest.importorskip("numba")

from sightline.attention.backends.numba.backend import NumbaBackend
from sightline.attention.backends.numba.calls import UNITS_PER_THREAD, AttentionShape
from sightline.attention.backends.numba.latent_backend import NumbaLatentBackend
from sightline.core.device import Device, DeviceKind
from sightline.testing.conformance.checks import CHECKS
from sightline.testing.conformance.kit import Verdict, try_row
from sightline.testing.conformance.rig import Subject
from sightline.testing.conformance.trial import Check, Effort

CPU = Device(DeviceKind.CPU, torch.device("cpu"), "cpu", None)
STEPS = ("cache-write", "causal", "transient", "context", "ragged", "padding", "idle", "empty-rows", "read-back")
FEATURES = ("sinks", "non-causal", "lse", "cache-saturation", "cache-dtypes")
PLANS = ("layers", "lanes", "plan-buffers", "stale-plans")


def narrowed(dtype: torch.dtype) -> Subject:
    row = next(row for row in NumbaBackend.capabilities if dtype in row.dtypes)
    # A head that is no multiple of a vector, and a group that is no multiple of a tile of queries.
    narrow = replace(row, head_dims=frozenset({18}), group_sizes=frozenset({1, 5}), page_sizes=frozenset({3, 16}))
    return Subject("numba", NumbaBackend, narrow, CPU)


def narrowed_latent(dtype: torch.dtype) -> Subject:
    row = next(row for row in NumbaLatentBackend.capabilities if dtype in row.dtypes)
    narrow = replace(row, head_dims=frozenset({22}), group_sizes=frozenset({1, 5}), page_sizes=frozenset({3, 16}))
    return Subject("numba-latent", NumbaLatentBackend, narrow, CPU)


def chosen(names: Sequence[str]) -> tuple[Check, ...]:
    checks = tuple(check for check in CHECKS if check.name in names)
    assert len(checks) == len(names)
    return checks


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        (torch.float32, ("context", "ragged", "padding", "sinks", "lse")),
        pytest.param(torch.float32, (*STEPS, *FEATURES, *PLANS), marks=pytest.mark.prove),
        pytest.param(torch.bfloat16, ("context", "ragged", "padding", "cache-dtypes"), marks=pytest.mark.prove),
        pytest.param(torch.float16, ("context", "ragged", "padding", "cache-dtypes"), marks=pytest.mark.slow),
    ],
)
def test_narrowed_rows_pass_checks_of_the_kit_compiled(dtype: torch.dtype, names: Sequence[str]) -> None:
    report = try_row(narrowed(dtype), Effort.QUICK, None, chosen(names))
    assert {result.check: f"{result.detail} {result.case} {result.trace}" for result in report.failed} == {}
    assert {result.verdict for result in report.results} == {Verdict.PASSED}


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        (torch.float32, ("context", "ragged", "padding", "lse")),
        pytest.param(
            torch.float32, (*STEPS, *(name for name in FEATURES if name != "sinks"), *PLANS), marks=pytest.mark.prove
        ),
        pytest.param(torch.bfloat16, ("context", "ragged", "padding", "cache-dtypes"), marks=pytest.mark.prove),
        pytest.param(torch.float16, ("context", "ragged", "padding", "cache-dtypes"), marks=pytest.mark.slow),
    ],
)
def test_narrowed_latent_rows_pass_checks_of_the_kit_compiled(dtype: torch.dtype, names: Sequence[str]) -> None:
    report = try_row(narrowed_latent(dtype), Effort.QUICK, None, chosen(names))
    assert {result.check: f"{result.detail} {result.case} {result.trace}" for result in report.failed} == {}
    assert {result.verdict for result in report.results} == {Verdict.PASSED}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("subject", [narrowed, narrowed_latent], ids=["softmax", "latent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrowed_rows_pass_the_whole_kit_compiled(
    dtype: torch.dtype, subject: Callable[[torch.dtype], Subject]
) -> None:
    report = try_row(subject(dtype), Effort.QUICK, None, CHECKS)
    assert {result.check: result.detail for result in report.failed} == {}


@pytest.mark.parametrize("num_threads", [1, 2, 7, 64])
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 500])
def test_contexts_are_split_until_every_thread_has_work_and_parts_fit_their_lease(
    num_tokens: int, num_threads: int
) -> None:
    splits = AttentionShape(num_kv_heads=3, group=3, key_dim=64, value_dim=64).num_splits(num_tokens, num_threads)
    units = num_tokens * splits
    assert units >= UNITS_PER_THREAD * num_threads
    assert splits == 1 or units < 2 * UNITS_PER_THREAD * num_threads
