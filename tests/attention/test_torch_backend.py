"""What is the torch backend's own: rows cut by query, contexts read in place. The kit proves the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sightline.attention.backends.torch.backend import MIN_KEYS_IN_PLACE
from sightline.attention.kinds import Feature
from sightline.attention.shared import tiles
from sightline.attention.spec import SoftmaxSpec
from sightline.cache.layout import Layout
from sightline.core.batch import FULL
from sightline.testing.conformance.rig import Row
from sightline.testing.conformance.steps import Step
from sightline.testing.conformance.trial import ragged_rows
from support import attention_cases as cases

PLAIN = SoftmaxSpec(num_q_heads=6, num_kv_heads=2, head_dim=16, scale=0.25)
SPECS = {
    "plain": PLAIN,
    "window": replace(PLAIN, window=9),
    "softcap": replace(PLAIN, softcap=2.0),
    "everything": replace(PLAIN, window=20, softcap=3.0, sinks=True),
}
TOLERANCE = 3e-5

all_specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
both_kernels = pytest.mark.parametrize("needs", [frozenset(), frozenset({Feature.LSE})], ids=["fused", "lse"])


def assert_right(step: Step, needs: frozenset[Feature]) -> None:
    """The oracle's output, and its LSE where there is one."""
    answer, expected = step.run(needs), step.expected()
    torch.testing.assert_close(answer.out, expected.out, atol=TOLERANCE, rtol=TOLERANCE)
    if answer.lse is not None:
        torch.testing.assert_close(answer.lse, expected.lse, atol=TOLERANCE, rtol=TOLERANCE)


@all_specs
@both_kernels
def test_rows_cut_by_query_to_bound_their_masks_equal_the_oracle(
    spec: SoftmaxSpec, needs: frozenset[Feature], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "MAX_BIAS_ELEMENTS", 60)
    assert_right(Step(cases.bench([spec], page_size=4), [*ragged_rows(4), Row(30, 13)]), needs)


@all_specs
@both_kernels
def test_long_contexts_side_by_side_in_the_pool_equal_the_oracle(spec: SoftmaxSpec, needs: frozenset[Feature]) -> None:
    bench = cases.bench([spec], page_size=4, layout=Layout.IN_ORDER, max_seq_len=1200)
    rows = [Row(1100, 1), Row(5, 1), Row(MIN_KEYS_IN_PLACE, 9), Row(1025, 6, FULL), Row(0, 40)]
    step = Step(bench, rows)
    assert bench.store.pools[0].table.run(step.table_rows[0], 0, 1101, 4) is not None
    assert_right(step, needs)
