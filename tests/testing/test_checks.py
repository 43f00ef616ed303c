"""What checks choose for themselves, and how they are cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sightline.attention.backends import registry
from sightline.core.device import DeviceKind, detect_device
from sightline.testing.conformance.checks.pages import large_numbers
from sightline.testing.conformance.rows import RowToTry, list_rows
from sightline.testing.conformance.samples import Samples
from sightline.testing.conformance.trial import CaseShare, Check, Effort, Trial

CPU = detect_device("cpu")
GIB = 1 << 30


@pytest.mark.parametrize(
    ("kind", "itemsize", "free_gib", "power"),
    [
        (DeviceKind.CUDA, 2, 139, 32),
        (DeviceKind.CUDA, 2, 17, 32),
        (DeviceKind.CUDA, 2, 16, 31),
        (DeviceKind.CUDA, 4, 33, 32),
        (DeviceKind.CUDA, 4, 17, 31),
        (DeviceKind.CPU, 2, 999, 31),
    ],
)
def test_a_large_pool_is_as_large_as_there_is_room(kind: DeviceKind, itemsize: int, free_gib: int, power: int) -> None:
    assert large_numbers(replace(CPU, kind=kind), itemsize, free_gib * GIB) == 1 << power


def test_a_trial_in_another_dtype_has_the_same_share() -> None:
    rows = list_rows([registry.find("reference", registry.BUILT_IN)], CPU)
    row = next(row for row in rows if isinstance(row, RowToTry))
    trial = Trial(row.subject, Effort.QUICK, Samples(), share=CaseShare(1, 3))
    assert trial.in_dtype(torch.bfloat16).share == CaseShare(1, 3)


def test_a_check_of_no_share_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a check of at least one share, got 0 of nothing"):
        Check("nothing", "nothing", lambda trial: None, num_shares=0)
