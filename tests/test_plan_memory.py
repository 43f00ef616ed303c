"""Plan buffers take as much memory as the largest step needs, however steps vary, and count in the memory ledger."""

from __future__ import annotations

from typing import Any

import pytest

from sightline.attention.backends.torch.backend import TorchBackend
from sightline.attention.backends.torch.latent_backend import TorchLatentBackend
from sightline.attention.contract import AttentionBackend
from sightline.attention.spec import AttentionSpec, LatentSpec, SoftmaxSpec
from sightline.cache.layout import Layout
from sightline.core.device import detect_device
from sightline.testing.conformance.rig import AttentionRig, RigSetting, Row, Subject
from sightline.testing.conformance.steps import Step

SPECS: dict[str, tuple[AttentionSpec, type[AttentionBackend[Any, Any]]]] = {
    "softmax": (SoftmaxSpec(num_q_heads=2, num_kv_heads=1, head_dim=8, scale=0.35), TorchBackend),
    "latent": (LatentSpec(2, 8, 4, 8, 8, 0.35), TorchLatentBackend),
}


def plan_bytes(bench: AttentionRig) -> int:
    return sum(entry.num_bytes for entry in bench.workspace.ledger() if entry.name == "plan buffers")


@pytest.mark.parametrize("kind", SPECS)
def test_a_chunk_beside_ever_more_long_rows_keeps_what_the_largest_step_needs(kind: str) -> None:
    """Found in the field of these backends: 850 MiB were kept where a step needs 14."""
    spec, backend = SPECS[kind]

    def make() -> AttentionRig:
        setting = RigSetting(
            page_size=16, max_rows=64, max_seq_len=1536, max_step_tokens=512, layout=Layout.SHUFFLED, num_pages=6200
        )
        return AttentionRig(Subject("tried", backend, backend.capabilities[0], detect_device("cpu")), [spec], setting)

    varied, largest = make(), 0
    for others in range(0, 61, 10):
        rows = [Row(1000 + 7 * index, 1) for index in range(others)] + [Row(997 + others, 448)]
        alone = make()
        for bench in (varied, alone):
            step = Step(bench, rows)
            step.plan()
            for table_row in step.table_rows:
                bench.store.close_row(table_row)
        largest = max(largest, plan_bytes(alone))
    assert 0 < plan_bytes(varied) <= 1.3 * largest
