"""Backends of compressed attention give what the oracle says about whole texts, however these are cut into steps."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from sightline.attention.backends.reference.compressed_backend import ReferenceCompressedBackend
from sightline.attention.backends.reference.compressed_index_backend import ReferenceCompressedIndexBackend
from sightline.attention.backends.torch.compressed_backend import TorchCompressedBackend
from sightline.attention.backends.torch.compressed_index_backend import TorchCompressedIndexBackend
from sightline.attention.compressed import compressor, tiles
from sightline.attention.kinds import SpecKind
from sightline.attention.oracle.compressed import sums_behind, window_behind
from sightline.cache.layout import Layout
from support.compressed_bench import Backends, CompressedBench, Text, TextPart, branch, text_of

REFERENCE: Backends = {
    SpecKind.COMPRESSED: ReferenceCompressedBackend,
    SpecKind.COMPRESSED_INDEX: ReferenceCompressedIndexBackend,
}
TORCH: Backends = {
    SpecKind.COMPRESSED: TorchCompressedBackend,
    SpecKind.COMPRESSED_INDEX: TorchCompressedIndexBackend,
}
both = pytest.mark.parametrize("backends", [REFERENCE, TORCH], ids=["reference", "torch"])


def texts(*lengths: int) -> list[Text]:
    return [text_of(length, seed) for seed, length in enumerate(lengths)]


def feed(bench: CompressedBench, text: Text, chunk: int, *, row: int | None = None, start: int = 0) -> int:
    """Computes a text in chunks, each compared with the oracle. Returns its row."""
    row = bench.open_row(text.length) if row is None else row
    for first in range(start, text.length, chunk):
        bench.step([TextPart(row, text, first, min(first + chunk, text.length))])
    return row


@pytest.mark.parametrize(
    ("backends", "chunk", "page_size"),
    [
        *[(TORCH, *each) for each in ((1, 16), (3, 1), (7, 1), (7, 16), (64, 1), (64, 64))],
        (REFERENCE, 7, 16),
    ],
)
def test_chunks_of_any_size_in_pages_of_any_size(backends: Backends, chunk: int, page_size: int) -> None:
    feed(CompressedBench(backends, page_size), text_of(70, 0), chunk)


@pytest.mark.parametrize(("backends", "seed"), [(REFERENCE, 0), (TORCH, 0), (TORCH, 1), (TORCH, 2)])
def test_ragged_rows_beside_each_other(backends: Backends, seed: int) -> None:
    order = random.Random(seed)
    bench = CompressedBench(backends, order.choice([1, 4, 16, 64]), layout=order.choice(list(Layout)), paranoid=True)
    own = texts(150, 33, 90, 70)
    rows = [bench.open_row(text.length) for text in own]
    done = [0] * len(own)
    while any(at < text.length for at, text in zip(done, own, strict=True)):
        parts = []
        for place, text in enumerate(own):
            count = min(order.choice([0, 1, 1, 3, 7, 40]), text.length - done[place])
            if count:
                parts.append(TextPart(rows[place], text, done[place], done[place] + count))
                done[place] += count
        order.shuffle(parts)
        if parts:
            bench.step(parts, padded=order.choice([0, 0, 2]))


@pytest.mark.parametrize("limit", [1, 400, 600, 4000])
def test_steps_are_split_where_memory_is_small(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressor, "MAX_ELEMENTS", limit)
    monkeypatch.setattr(tiles, "MAX_ELEMENTS", limit)
    bench, own = CompressedBench(TORCH), texts(90, 33, 7, 22)
    rows = [bench.open_row(text.length) for text in own]
    for begin, end in ((0.0, 0.3), (0.3, 0.7), (0.7, 1.0)):
        cuts = [(int(begin * text.length), int(end * text.length)) for text in own]
        bench.step([TextPart(row, text, *cut) for row, text, cut in zip(rows, own, cuts, strict=True)], padded=2)


@both
def test_a_step_without_a_cache_reads_its_own_tokens(backends: Backends) -> None:
    bench = CompressedBench(backends)
    parts = [TextPart(place + 1, text, 0, text.length) for place, text in enumerate(texts(150, 3, 33, 1))]
    bench.check(parts, bench.run(parts, transient=True))


@pytest.mark.parametrize(
    ("backends", "start", "accepted"),
    [
        (REFERENCE, 30, 1),
        (TORCH, 29, 1),
        (TORCH, 29, 4),
        (TORCH, 30, 1),
        (TORCH, 30, 2),
        (TORCH, 46, 1),
        (TORCH, 46, 3),
    ],
)
def test_what_refused_guesses_left_is_never_read(backends: Backends, start: int, accepted: int) -> None:
    """Guesses complete windows; those behind the accepted ones are wrong, and so are entries that they wrote."""
    bench, [text, other] = CompressedBench(backends, 16), texts(70, 70)
    row = bench.open_row(text.length)
    bench.step([TextPart(row, text, 0, start)])
    guessed = branch(text, other, start + accepted)
    bench.step([TextPart(row, guessed, start, start + 5, candidates=5)], commit=False)
    bench.store.lengths.commit(row, start + accepted)
    bench.store.lengths.settle(row, start + accepted)
    feed(bench, text, 3, row=row, start=start + accepted)


@pytest.mark.parametrize(
    ("backends", "page_size", "position"),
    [(REFERENCE, 16, 32), (TORCH, 1, 37), (TORCH, 16, 48), (TORCH, 4, 36), (TORCH, 64, 64)],
)
def test_a_row_goes_on_from_a_checkpoint_and_shared_pages(backends: Backends, page_size: int, position: int) -> None:
    bench, [text, other] = CompressedBench(backends, page_size), texts(150, 150)
    states = bench.store.main.states
    assert states is not None
    first = bench.open_row(text.length)
    states.pin(first, position)
    bench.step([TextPart(first, text, 0, 70)])
    checkpoint = states.checkpoint(first, position)
    assert checkpoint is not None
    second = bench.store.open_row()
    pages = [bench.store.committed_bundle(first, index) for index in range(position // page_size)]
    bench.store.adopt(second, pages)
    bench.store.restore(second, checkpoint)
    bench.store.grow_row(second, text.length)
    branched = branch(text, other, position)
    bench.step([TextPart(first, text, 70, 90), TextPart(second, branched, position, position + 33)])
    bench.store.close_row(first)
    feed(bench, branched, 50, row=second, start=position + 33)


@both
def test_half_precision_is_close_to_the_oracle(backends: Backends) -> None:
    bench, text = CompressedBench(backends, dtype=torch.bfloat16), Text(90, 3, torch.bfloat16)
    row = bench.open_row(text.length)
    for start in range(0, 90, 30):
        part = TextPart(row, text, start, start + 30)
        found = bench.run([part])
        for layer, out in enumerate(found.outputs):
            if layer not in found.chosen:
                torch.testing.assert_close(out.float(), text.outputs[layer][start : start + 30], atol=3e-2, rtol=3e-2)
        bench.store.lengths.commit(row, start + 30)


@pytest.mark.parametrize(("length", "chunk"), [(1, 1), (3, 5), (4, 1), (33, 5), (48, 70), (70, 70)])
def test_what_is_kept_of_a_row_is_a_function_of_its_tokens(length: int, chunk: int) -> None:
    bench, text = CompressedBench(TORCH, 1), text_of(70, 0)
    row, states = bench.open_row(70), bench.store.main.states
    assert states is not None
    for start in range(0, length, chunk):
        bench.step([TextPart(row, text, start, min(start + chunk, length))])
    slot = states.slot(row, length)
    for group in bench.groups:
        spec: Any = group.spec
        for place, layer in enumerate(group.layers):
            planes = bench.store.cache(group.name).states
            inputs = text.index_inputs[layer] if group.chooses else text.inputs[layer]
            if inputs.entries is not None:
                wanted = sums_behind(spec.compression, inputs.entries.part(slice(length)))
                found = planes.plane("sums")[place, slot]
                # A sum is that of its maximum: only their product counts.
                torch.testing.assert_close(found[:, 1:] * found[:, :1].exp(), wanted[:, 1:] * wanted[:, :1].exp())
            if not group.chooses:
                ring = window_behind(spec, text.inputs[layer].key[:length])
                assert torch.equal(planes.plane("window")[place, slot], ring)
