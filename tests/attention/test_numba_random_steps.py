"""Random steps of the compiled CPU backends equal the oracle: rows of any lengths and masks, over any pages.

What is drawn together is what an engine mixes in a step: prompts, chunks behind a context, single tokens, trees, rows
without new tokens and padding, with a cache of the model's dtype or of 8 bits, in either of two layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from sightline.attention.backends.numba.backend import NumbaBackend
from sightline.attention.backends.numba.latent_backend import NumbaLatentBackend
from sightline.attention.contract import AttentionBackend
from sightline.attention.kinds import Feature
from sightline.attention.spec import LatentSpec, SoftmaxSpec
from sightline.core.batch import CAUSAL, FULL
from sightline.testing.conformance.rig import RigSetting, Row, Subject, tree_row
from sightline.testing.conformance.steps import Step
from support.attention_cases import CPU_DEVICE
from support.guarded_rig import GuardedRig

SOFTMAX = SoftmaxSpec(num_q_heads=6, num_kv_heads=2, head_dim=18, scale=0.25)
LATENT = LatentSpec(num_q_heads=3, latent_dim=70, rope_dim=6, nope_dim=5, value_dim=4, scale=0.3)
"""Sizes that are no multiples of a vector, and a latent that several units of work project."""
STEPS = 40
CLOSE = 1e-4

Spec = SoftmaxSpec | LatentSpec


def softmax(draw: Random) -> Spec:
    window = draw.choice([None, None, 1, 7, 40])
    return replace(SOFTMAX, window=window, softcap=draw.choice([None, 3.0]), sinks=draw.random() < 0.4)


def latent(draw: Random) -> Spec:
    del draw
    return LATENT


def draw_row(draw: Random, *, transient: bool) -> Row:
    context_len = 0 if transient else draw.choice([0, 0, 1, 15, 16, 17, 64, 130])
    query_len = draw.choice([0, 1, 1, 1, 2, 9, 33])
    if 0 < query_len < 10 and draw.random() < 0.3:
        return tree_row(context_len, [draw.randrange(-1, child) for child in range(query_len)])
    return Row(context_len, query_len, FULL if query_len and draw.random() < 0.2 else CAUSAL)


def check_step(backend: type[AttentionBackend[Any, Any]], spec: Spec, draw: Random) -> None:
    row = next(row for row in backend.capabilities if torch.float32 in row.dtypes)
    setting = RigSetting(
        page_size=draw.choice([1, 3, 16, 64]),
        cache_dtype=draw.choice([torch.float32, torch.float8_e4m3fn]),
        max_seq_len=200,
        max_rows=8,
    )
    subject = Subject("numba", backend, row, CPU_DEVICE)
    bench = GuardedRig(subject, [spec, spec], setting, num_threads=draw.choice([1, 2, 5]))
    transient = draw.random() < 0.2
    rows = [draw_row(draw, transient=transient) for _ in range(draw.choice([1, 2, 5]))]
    rows.append(Row(0, 1))
    step = Step(bench, rows, seed=draw.randrange(1 << 20), layer=draw.randrange(2), transient=transient)
    num_tokens = step.batch.num_tokens
    if draw.random() < 0.3:
        step.pad(num_rows=1, num_tokens=3, value=float("nan"))
    answer, expected = step.run(frozenset({Feature.LSE})), step.expected()
    torch.testing.assert_close(answer.out[:num_tokens], expected.out, atol=CLOSE, rtol=CLOSE)
    assert answer.lse is not None
    torch.testing.assert_close(answer.lse[:num_tokens], expected.lse, atol=CLOSE, rtol=CLOSE)
    assert transient or step.unwritten() is None
    assert bench.guarded.overrun() == []


@pytest.mark.parametrize(
    ("backend", "spec"), [(NumbaBackend, softmax), (NumbaLatentBackend, latent)], ids=["softmax", "latent"]
)
def test_random_steps_equal_the_oracle(
    backend: type[AttentionBackend[Any, Any]], spec: Callable[[Random], Spec]
) -> None:
    draw = Random(26)
    for _ in range(STEPS):
        check_step(backend, spec(draw), draw)
