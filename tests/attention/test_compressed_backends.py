"""Backends of compressed attention give what the oracle says about whole texts, however these are cut into steps."""

from __future__ import annotations

import random

import pytest

from sightline.attention.backends.reference.compressed_backend import ReferenceCompressedBackend
from sightline.attention.backends.reference.compressed_index_backend import ReferenceCompressedIndexBackend
from sightline.attention.backends.torch.compressed_backend import TorchCompressedBackend
from sightline.attention.backends.torch.compressed_index_backend import TorchCompressedIndexBackend
from sightline.attention.kinds import SpecKind
from sightline.cache.layout import Layout
from support.compressed_bench import Backends, CompressedBench, Text, TextPart

REFERENCE: Backends = {
    SpecKind.COMPRESSED: ReferenceCompressedBackend,
    SpecKind.COMPRESSED_INDEX: ReferenceCompressedIndexBackend,
}
TORCH: Backends = {
    SpecKind.COMPRESSED: TorchCompressedBackend,
    SpecKind.COMPRESSED_INDEX: TorchCompressedIndexBackend,
}
both = pytest.mark.parametrize("backends", [REFERENCE, TORCH], ids=["reference", "torch"])
LENGTH = 150


def texts(*lengths: int) -> list[Text]:
    return [Text(length, seed) for seed, length in enumerate(lengths)]


def feed(bench: CompressedBench, text: Text, chunk: int, stop: int | None = None) -> int:
    """Computes a text in chunks, each compared with the oracle. Returns its row."""
    row, end = bench.open_row(text.length), text.length if stop is None else stop
    for start in range(0, end, chunk):
        bench.step([TextPart(row, text, start, min(start + chunk, end))])
    return row


@both
@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_chunks_of_any_size_in_pages_of_any_size(backends: Backends, chunk: int, page_size: int) -> None:
    [text] = texts(70 if chunk == 1 else LENGTH)
    feed(CompressedBench(backends, page_size), text, chunk)


@both
@pytest.mark.parametrize("seed", range(4))
def test_ragged_rows_beside_each_other(backends: Backends, seed: int) -> None:
    order = random.Random(seed)
    bench = CompressedBench(backends, order.choice([1, 4, 16, 64]), layout=order.choice(list(Layout)))
    own = texts(150, 33, 90, 150, 64)
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
