"""Rows with many new tokens on the compiled CPU backend: several blocks of packed keys, units and tiles of queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from sightline.attention.backends.numba import calls
from sightline.attention.kinds import Feature
from sightline.attention.spec import SoftmaxSpec
from sightline.core.batch import FULL
from sightline.kernels.cpu.attend_kernel import AttendArguments
from sightline.kernels.cpu.attend_tiles import BLOCK
from sightline.kernels.cpu.compiler import CompiledKernel
from sightline.kernels.cpu.record import Launcher, Record
from sightline.testing.conformance.rig import AttentionRig, Row
from sightline.testing.conformance.steps import Step
from support import attention_cases as cases

PLAIN = SoftmaxSpec(num_q_heads=6, num_kv_heads=2, head_dim=18, scale=0.25)
"""A head that is no multiple of a vector, and a group that is no multiple of a tile of queries."""
SPECS = {
    "plain": PLAIN,
    "window": replace(PLAIN, window=40),
    "everything": replace(PLAIN, window=300, softcap=3.0, sinks=True),
}
LONG = [Row(0, 5 * BLOCK + 6), Row(8 * BLOCK - 5, 3), Row(7, 100, FULL), Row(0, 1), Row(3, 9, FULL)]
TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def check(spec: SoftmaxSpec, rows: list[Row], needs: frozenset[Feature] = frozenset(), **setting: object) -> None:
    step = Step(cases.bench([spec], "numba", page_size=4, max_seq_len=600, **setting), rows)
    answer, expected = step.run(needs), step.expected()
    tolerance = TOLERANCES[setting.get("dtype", torch.float32)]  # type: ignore[index]
    torch.testing.assert_close(answer.out.float(), expected.out.float(), atol=tolerance, rtol=tolerance)
    if needs:
        assert answer.lse is not None
        torch.testing.assert_close(answer.lse, expected.lse, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("needs", [frozenset(), frozenset({Feature.LSE})], ids=["out", "lse"])
def test_long_prompts_equal_the_oracle(spec: SoftmaxSpec, needs: frozenset[Feature]) -> None:
    check(spec, LONG, needs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_long_prompts_in_low_precision_equal_the_oracle(dtype: torch.dtype) -> None:
    check(PLAIN, LONG, dtype=dtype, cache_dtype=dtype)


def test_an_8_bit_cache_is_read_with_its_scales() -> None:
    check(PLAIN, LONG, cache_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("group", [1, 4, 70])
def test_groups_of_any_size(group: int) -> None:
    """One query head per key head, a whole tile, and more than a unit has queries."""
    check(replace(PLAIN, num_q_heads=2 * group), [Row(0, 70), Row(5, 6)])


def test_a_prompt_has_the_same_bits_alone_and_beside_other_rows() -> None:
    def bench() -> AttentionRig:
        return cases.bench([SPECS["everything"]], "numba", page_size=4, max_seq_len=600)

    alone = Step(bench(), [Row(30, 70)])
    beside = Step(bench(), [Row(0, 1), Row(30, 70), Row(200, 9)])
    beside.contexts[1] = alone.contexts[0]
    beside.write_contexts()
    beside.take_row(alone, slice(1, 71))
    assert torch.equal(beside.run().out[1:71], alone.run().out)


def test_prompts_run_the_kernel_for_prompts_and_single_tokens_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    launch = calls.launch_kernel

    def watched(launcher: Launcher, kernel: CompiledKernel, arguments: tuple[int, ...], *keeps: object) -> None:
        launched.append(kernel.name)
        launch(launcher, kernel, arguments, *keeps)

    monkeypatch.setattr(calls, "launch_kernel", watched)
    check(PLAIN, [Row(3, 2), Row(0, 5)])
    assert "attend_prompt" in launched
    launched.clear()
    check(PLAIN, [Row(3, 1), Row(0, 1)])
    assert "attend_prompt" not in launched


def swapped(first: int, second: int) -> Callable[[Record], None]:
    def change(record: Record) -> None:
        record.arguments[[first, second]] = record.arguments[[second, first]]

    return change


def one_row_less(record: Record) -> None:
    record.arguments[AttendArguments._fields.index("num_rows")] -= 1


def no_window(record: Record) -> None:
    record.arguments[5] = 0


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("attend_prompt", swapped(3, 6)),
        ("attend_prompt", one_row_less),
        ("locate", no_window),
    ],
    ids=["keys for values", "the last row is left out", "the window is ignored"],
)
def test_planted_faults_are_caught(name: str, fault: Callable[[Record], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(launcher: Launcher, kernel: CompiledKernel, arguments: tuple[int, ...], *keeps: object) -> None:
        record = Record(kernel.address, np.array(arguments, dtype=np.int64), (kernel, *keeps), kernel.name)
        if kernel.name == name:
            fault(record)
        launcher.launch(record)

    check(SPECS["window"], LONG)
    monkeypatch.setattr(calls, "launch_kernel", planted)
    with pytest.raises(AssertionError):
        check(SPECS["window"], LONG)
