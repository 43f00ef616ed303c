"""Compressed attention with Triton's kernels, in its interpreter: whole texts, however they are cut into steps."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from sightline.attention.backends.torch.compressed_backend import TorchCompressedBackend
from sightline.attention.backends.torch.compressed_index_backend import TorchCompressedIndexBackend
from sightline.attention.buffers import PlanBuffers
from sightline.attention.contract import AttentionBackend, AttentionPlan, BackendContext, StepView
from sightline.attention.kinds import SpecKind
from sightline.cache.layout import Layout
from support.compressed_bench import Backends, CompressedBench, Text, TextPart, branch, text_of

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("a GPU has tests of its own, and no interpreter", allow_module_level=True)

from sightline.attention.backends.triton.compressed_backend import TritonCompressedBackend
from sightline.attention.backends.triton.compressed_index_backend import TritonCompressedIndexBackend

TRITON: Backends = {
    SpecKind.COMPRESSED: TritonCompressedBackend,
    SpecKind.COMPRESSED_INDEX: TritonCompressedIndexBackend,
}


def feed(bench: CompressedBench, text: Text, chunk: int, *, row: int | None = None, start: int = 0) -> int:
    """Computes a text in chunks, each compared with the oracle. Returns its row."""
    row = bench.open_row(text.length) if row is None else row
    for first in range(start, text.length, chunk):
        bench.step([TextPart(row, text, first, min(first + chunk, text.length))])
    return row


def proof(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.prove)


@pytest.mark.parametrize(("chunk", "page_size", "length"), [(6, 4, 11), proof(5, 1, 24), proof(40, 64, 45)])
def test_chunks_of_any_size_in_pages_of_any_size(chunk: int, page_size: int, length: int) -> None:
    feed(CompressedBench(TRITON, page_size), text_of(length, 0), chunk)


@pytest.mark.prove
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ragged_rows_beside_each_other(seed: int) -> None:
    order = random.Random(seed)
    bench = CompressedBench(TRITON, order.choice([1, 4, 16]), layout=order.choice(list(Layout)), paranoid=True)
    own = [text_of(length, place) for place, length in enumerate((22, 9, 13))]
    rows = [bench.open_row(text.length) for text in own]
    done = [0] * len(own)
    while any(at < text.length for at, text in zip(done, own, strict=True)):
        parts = []
        for place, text in enumerate(own):
            count = min(order.choice([0, 1, 5, 20]), text.length - done[place])
            if count:
                parts.append(TextPart(rows[place], text, done[place], done[place] + count))
                done[place] += count
        if parts:
            bench.step(parts, padded=order.choice([0, 2]))


@pytest.mark.prove
def test_a_step_without_a_cache_reads_its_own_tokens() -> None:
    bench = CompressedBench(TRITON)
    parts = [TextPart(place + 1, text_of(length, place), 0, length) for place, length in enumerate((22, 3, 1))]
    bench.check(parts, bench.run(parts, transient=True))


@pytest.mark.prove
@pytest.mark.parametrize(
    ("start", "accepted"), [(29, 4), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((29, 1), (30, 2)))]
)
def test_what_refused_guesses_left_is_never_read(start: int, accepted: int) -> None:
    bench, text, other = CompressedBench(TRITON, 16), text_of(37, 0), text_of(37, 1)
    row = bench.open_row(text.length)
    bench.step([TextPart(row, text, 0, start)])
    guessed = branch(text, other, start + accepted)
    bench.step([TextPart(row, guessed, start, start + 5, candidates=5)], commit=False)
    bench.store.lengths.commit(row, start + accepted)
    bench.store.lengths.settle(row, start + accepted)
    feed(bench, text, 3, row=row, start=start + accepted)


@pytest.mark.prove
def test_triton_goes_on_from_what_torch_kept_and_the_other_way_round() -> None:
    """Steps of one row may run on different backends."""
    backends: Backends = {
        SpecKind.COMPRESSED: in_turns(TritonCompressedBackend, TorchCompressedBackend),
        SpecKind.COMPRESSED_INDEX: in_turns(TritonCompressedIndexBackend, TorchCompressedIndexBackend),
    }
    feed(CompressedBench(backends, 4), text_of(25, 0), 5)


def in_turns(
    one: type[AttentionBackend[Any, Any]], other: type[AttentionBackend[Any, Any]]
) -> type[AttentionBackend[Any, Any]]:
    """A backend whose steps are planned by two, one after the other."""

    class InTurns(AttentionBackend[Any, Any]):
        capabilities = one.capabilities

        def __init__(self, context: BackendContext[Any]) -> None:
            self._turns = itertools.cycle([one(context), other(context)])

        def plan(self, step: StepView, buffers: PlanBuffers) -> AttentionPlan[Any]:
            return next(self._turns).plan(step, buffers)

    return InTurns
