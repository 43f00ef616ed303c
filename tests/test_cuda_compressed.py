"""On an NVIDIA GPU: compressed attention gives what the oracle says about whole texts, captured in a graph too."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from sightline.attention.kinds import SpecKind
from support.compressed_bench import DIM as HEAD_DIM
from support.compressed_bench import HEADS, TOP_K, Backends, CompressedBench, Text, TextPart, branch, text_of
from support.hot_compressed import traffic

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
DEVICE = torch.device("cuda")


def backends() -> Backends:
    from sightline.attention.backends.triton.compressed_backend import TritonCompressedBackend
    from sightline.attention.backends.triton.compressed_index_backend import TritonCompressedIndexBackend

    return {
        SpecKind.COMPRESSED: TritonCompressedBackend,
        SpecKind.COMPRESSED_INDEX: TritonCompressedIndexBackend,
    }


def made(page_size: int = 16, **changes: object) -> CompressedBench:
    return CompressedBench(backends(), page_size, device=DEVICE, **changes)  # type: ignore[arg-type]


def hot(page_size: int = 16, buffer: int = 2 * TOP_K) -> CompressedBench:
    """With chosen entries in host memory."""
    from sightline.kernels.triton.hot_entries import fetch_entries

    return made(page_size, buffer=buffer, copy=fetch_entries)


def feed(bench: CompressedBench, text: Text, chunk: int, *, row: int | None = None, start: int = 0) -> int:
    row = bench.open_row(text.length) if row is None else row
    for first in range(start, text.length, chunk):
        bench.step([TextPart(row, text, first, min(first + chunk, text.length))])
    return row


@pytest.mark.parametrize(("chunk", "page_size"), [(1, 16), (3, 1), (7, 4), (64, 64)])
def test_chunks_of_any_size_in_pages_of_any_size(chunk: int, page_size: int) -> None:
    feed(made(page_size), text_of(150, 0), chunk)


@pytest.mark.parametrize("seed", range(4))
def test_ragged_rows_beside_each_other(seed: int) -> None:
    order = random.Random(seed)
    bench = made(order.choice([1, 4, 16, 64]), paranoid=True)
    own = [text_of(length, place) for place, length in enumerate((150, 33, 90, 70))]
    rows, done = [bench.open_row(text.length) for text in own], [0] * len(own)
    while any(at < text.length for at, text in zip(done, own, strict=True)):
        parts = []
        for place, text in enumerate(own):
            count = min(order.choice([0, 1, 1, 3, 7, 40]), text.length - done[place])
            if count:
                parts.append(TextPart(rows[place], text, done[place], done[place] + count))
                done[place] += count
        if parts:
            bench.step(parts, padded=order.choice([0, 0, 2]))


def test_a_step_without_a_cache_reads_its_own_tokens() -> None:
    bench = made()
    parts = [TextPart(place + 1, text_of(length, place), 0, length) for place, length in enumerate((150, 3, 33, 1))]
    bench.check(parts, bench.run(parts, transient=True))


@pytest.mark.parametrize(("start", "accepted"), [(29, 1), (30, 2), (46, 3)])
def test_what_refused_guesses_left_is_never_read(start: int, accepted: int) -> None:
    bench, text, other = made(), text_of(70, 0), text_of(70, 1)
    row = bench.open_row(text.length)
    bench.step([TextPart(row, text, 0, start)])
    guessed = branch(text, other, start + accepted)
    bench.step([TextPart(row, guessed, start, start + 5, candidates=5)], commit=False)
    bench.store.lengths.commit(row, start + accepted)
    bench.store.lengths.settle(row, start + accepted)
    feed(bench, text, 3, row=row, start=start + accepted)


def test_half_precision_is_close_to_the_oracle() -> None:
    bench, text = made(dtype=torch.bfloat16), Text(90, 3, torch.bfloat16)
    row = bench.open_row(text.length)
    for start in range(90):
        part = TextPart(row, text, start, start + 1)
        found = bench.run([part])
        for layer, out in enumerate(found.outputs):
            if layer not in found.chosen:
                wanted = text.outputs[layer][start : start + 1]
                torch.testing.assert_close(out.float().cpu(), wanted, atol=3e-2, rtol=3e-2)
        bench.store.lengths.commit(row, start + 1)


@pytest.mark.parametrize(("page_size", "buffer"), [(16, TOP_K), (1, 3 * TOP_K + 1), (64, 200)])
def test_chosen_entries_in_host_memory_are_read_behind_hot_ones(page_size: int, buffer: int) -> None:
    bench = hot(page_size, buffer=buffer)
    traffic(bench)
    torch.cuda.synchronize()
    # The first call, in `traffic`, has started a copy of the counts.
    counts = bench.coordinators["group0"].counts()
    assert 0 < counts.copied < counts.chosen


@pytest.mark.parametrize(("make", "layer"), [(made, 1), (made, 0), (hot, 0)])
def test_a_captured_step_gives_the_same_bits(make: Callable[[], CompressedBench], layer: int) -> None:
    """Its launches depend on nothing that a replay changes."""
    bench, text = make(), text_of(70, 0)
    row = bench.open_row(text.length)
    bench.step([TextPart(row, text, 0, 69)])
    part = TextPart(row, text, 69, 70)
    planned = bench.plan([part])
    bench.planner.launch(planned)
    planned.prepare()
    chosen = text.chosen[layer][69:].to(DEVICE, torch.int32) if layer in text.chosen else None
    inputs = bench.joined([part], layer, 1, chosen)
    eager = torch.full((1, HEADS, HEAD_DIM), torch.nan, device=DEVICE)
    planned.attend(layer, inputs, eager)
    replayed, graph = torch.full_like(eager, torch.nan), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned.attend(layer, inputs, replayed)
    graph.replay()
    assert torch.equal(replayed, eager)
    torch.testing.assert_close(replayed[0].cpu(), text.outputs[layer][69], atol=3e-5, rtol=3e-5)
