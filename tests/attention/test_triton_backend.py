"""The Triton backends pass the kit in Triton's interpreter, on rows narrowed to what a CPU computes in a minute.

The whole rows are proven on a GPU (`tests/test_cuda.py`); whole kits of narrowed rows are `slow`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sightline.attention.backends.triton.backend import TritonBackend
from sightline.attention.backends.triton.compressed_backend import TritonCompressedBackend
from sightline.attention.backends.triton.compressed_index_backend import TritonCompressedIndexBackend
from sightline.attention.backends.triton.index_backend import TritonIndexBackend
from sightline.attention.backends.triton.latent_backend import TritonLatentBackend
from sightline.attention.capability import Capability
from sightline.attention.contract import AttentionBackend
from sightline.attention.oracle.dtypes import cache_dtypes
from sightline.attention.spec import AttentionSpec, LatentSpec, SoftmaxSpec
from sightline.core.device import Device, DeviceKind
from sightline.testing.conformance.checks import CHECKS
from sightline.testing.conformance.kit import Verdict, try_row
from sightline.testing.conformance.rig import AttentionRig, RigSetting, Row, Subject
from sightline.testing.conformance.steps import Step
from sightline.testing.conformance.trial import Check, Effort

CPU = Device(DeviceKind.CPU, torch.device("cpu"), "cpu", None)
FP32, BF16 = torch.float32, torch.bfloat16
Kind = type[AttentionBackend[Any, Any]]

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here: tests/test_cuda.py tries them"),
    # The interpreter computes with numpy, which says where scores leave the range of exp2 on purpose.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),
]


def narrowed(kind: Kind, dtype: torch.dtype, head_dim: int, groups: set[int], pages: set[int]) -> Subject:
    """The row that computes in the dtype, of few sizes, as if it were for a CPU."""
    rows: list[Capability] = [row for row in kind.capabilities if dtype in row.dtypes]
    narrow = replace(
        rows[0],
        devices=frozenset({DeviceKind.CPU}),
        # The rows of the backend as one.
        cache_dtypes=frozenset(each for row in rows for each in cache_dtypes(row)),
        head_dims=frozenset({head_dim}),
        group_sizes=frozenset(groups),
        page_sizes=frozenset(pages),
    )
    return Subject("triton", kind, narrow, CPU)


def chosen(names: Sequence[str]) -> tuple[Check, ...]:
    checks = tuple(check for check in CHECKS if check.name in names)
    assert len(checks) == len(names)
    return checks


STEPS = ("cache-write", "causal", "transient", "context", "ragged", "padding", "idle", "empty-rows", "read-back")
PLANS = ("layers", "lanes", "plan-buffers", "several-plans", "stale-plans")
SOFTMAX_FEATURES = ("sinks", "shared-cache", "lent-in-the-step", "context-alone", "non-causal", "cache-saturation")
SPARSE = ("unchosen-entries", "chosen-pages", "choices-in-turn")
INDEX = (
    "cache-write",
    "causal",
    "transient",
    "padding",
    "empty-rows",
    "read-back",
    "unused-slots",
    "cache-dtypes",
    "lanes",
)
COMPRESSED = ("padding", "empty-rows", "transient", "cut-anywhere", "entry-pages", "chosen-numbers", "sink-weights")
COMPRESSED_INDEX = ("padding", "transient", "entries", "cut-anywhere", "gates", "entry-pages")
LATENT_FEATURES = ("heads", "lse", "host-bounds", "cache-saturation")


@pytest.mark.prove
@pytest.mark.parametrize(
    ("kind", "dtype", "head_dim", "names"),
    [
        pytest.param(TritonBackend, FP32, 16, (*STEPS, *SOFTMAX_FEATURES, *PLANS), marks=pytest.mark.slow),
        pytest.param(
            TritonBackend, BF16, 16, ("context", "ragged", "padding", "lse", "cache-dtypes"), marks=pytest.mark.slow
        ),
        pytest.param(TritonLatentBackend, FP32, 24, (*STEPS, *LATENT_FEATURES, *PLANS), marks=pytest.mark.slow),
        pytest.param(
            TritonLatentBackend, BF16, 24, ("context", "ragged", "padding", "cache-dtypes"), marks=pytest.mark.slow
        ),
        (TritonLatentBackend, FP32, 24, SPARSE),
        (TritonIndexBackend, FP32, 16, INDEX),
        pytest.param(TritonCompressedBackend, FP32, 16, COMPRESSED, marks=pytest.mark.slow),
        pytest.param(TritonCompressedIndexBackend, FP32, 16, COMPRESSED_INDEX, marks=pytest.mark.slow),
    ],
    ids=[
        *("softmax-fp32", "softmax-bf16", "latent-fp32", "latent-bf16", "latent-sparse", "index"),
        *("compressed", "compressed-index"),
    ],
)
def test_narrowed_rows_pass_checks_of_the_kit(
    kind: Kind, dtype: torch.dtype, head_dim: int, names: Sequence[str]
) -> None:
    require_passed(narrowed(kind, dtype, head_dim, {2}, {16}), chosen(names))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize(("kind", "head_dim"), [(TritonBackend, 32), (TritonLatentBackend, 40)], ids=["softmax", "mla"])
def test_narrowed_rows_pass_the_whole_kit(kind: Kind, dtype: torch.dtype, head_dim: int) -> None:
    groups = {2, 3} if kind is TritonBackend else {4}
    require_passed(narrowed(kind, dtype, head_dim, groups, {4, 16}), CHECKS)


def require_passed(subject: Subject, checks: Sequence[Check]) -> None:
    report = try_row(subject, Effort.QUICK, None, checks)
    assert {result.check: f"{result.detail} {result.case} {result.trace}" for result in report.failed} == {}
    if checks is not CHECKS:
        assert {result.verdict for result in report.results} == {Verdict.PASSED}


SPECS: Mapping[Kind, AttentionSpec] = {
    TritonBackend: SoftmaxSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, scale=0.25),
    TritonLatentBackend: LatentSpec(
        num_q_heads=2, latent_dim=16, rope_dim=8, nope_dim=8, value_dim=8, scale=0.25
    ),
}  # fmt: skip
KINDS = pytest.mark.parametrize("kind", [TritonBackend, TritonLatentBackend], ids=["softmax", "latent"])


def many_rows(kind: Kind, count: int) -> Step:
    setting = RigSetting(max_rows=count, max_seq_len=64, max_step_tokens=count)
    bench = AttentionRig(narrowed(kind, FP32, 24, {2}, {16}), [SPECS[kind]], setting)
    return Step(bench, [Row(index % 40, 1) for index in range(count)])


@KINDS
def test_planning_many_rows_that_decode_takes_the_host_little(kind: Kind) -> None:
    step = many_rows(kind, 256)
    seconds = []
    for _ in range(20):
        started = time.process_time()
        step.plan()
        seconds.append(time.process_time() - started)
    # 0.2 ms of a processor; what grows with more than the rows would be far beyond.
    assert min(seconds) < 2e-3


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the names of the operations that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@KINDS
def test_planning_rows_that_decode_computes_nothing_and_waits_for_nothing(kind: Kind) -> None:
    step = many_rows(kind, 12)
    with Calls() as calls:
        step.plan()
    # Views alone: no copy to the device, no value from it.
    assert set(calls.names) <= {"slice", "select", "view", "unsqueeze", "alias", "detach"}
