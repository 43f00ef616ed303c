"""Stands for FlashInfer's wrappers on a CPU: takes the arguments of version 0.7.2 and computes row after row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from support.dense_attention import attend_dense


class _Wrapper:
    """A wrapper that was planned with the lengths of some rows, and where their entries are."""

    def __init__(self, workspace: Tensor, *layout: str, **options: object) -> None:
        assert workspace.dtype is torch.uint8
        assert layout in (("NHD",), ())
        self.options = options
        self.queries: list[slice] = []
        self.slots: list[Tensor] = []
        self.scale = 0.0

    def _lay_out(
        self, queries: Sequence[int], offsets: Tensor, pages: Tensor, lengths: Sequence[int], size: int
    ) -> None:
        self.queries = [slice(start, end) for start, end in pairwise(queries)]
        own = [pages[start:end].long() for start, end in pairwise(offsets.tolist())]
        places = [(each[:, None] * size + torch.arange(size)).flatten() for each in own]
        self.slots = [each[:length] for each, length in zip(places, lengths, strict=True)]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        for tokens, slots in zip(self.queries, self.slots, strict=True):
            out[tokens] = attend_dense(q[tokens], k[slots], v[slots], self.scale)


def _row_lengths(offsets: Tensor, last_page_lens: Tensor, size: int) -> list[int]:
    num_pages = (offsets[1:] - offsets[:-1]).tolist()
    return [(count - 1) * size + last for count, last in zip(num_pages, last_page_lens.tolist(), strict=True)]


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(self, offsets: Tensor, pages: Tensor, last_page_lens: Tensor, *sizes: int, **given: Any) -> None:
        assert self.options == {"use_tensor_cores": True}
        assert set(given) == {"q_data_type", "kv_data_type", "sm_scale"}
        self.scale = given["sm_scale"]
        lengths = _row_lengths(offsets, last_page_lens, sizes[-1])
        self._lay_out(range(len(lengths) + 1), offsets, pages, lengths, sizes[-1])

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        self._attend(q, cache[0].flatten(0, 1), cache[1].flatten(0, 1), out)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, queries: Tensor, offsets: Tensor, pages: Tensor, last_page_lens: Tensor, *sizes: int, **given: Any
    ) -> None:
        assert self.options == {"backend": "fa3"}
        assert given["causal"] is True
        self.scale = given["sm_scale"]
        lengths = _row_lengths(offsets, last_page_lens, sizes[-1])
        self._lay_out(queries.tolist(), offsets, pages, lengths, sizes[-1])

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        self._attend(q, cache[0].flatten(0, 1), cache[1].flatten(0, 1), out)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def plan(self, queries: Tensor, keys: Tensor, *heads: int, **given: Any) -> None:
        assert len(heads) == 3
        assert given["causal"] is True
        self.scale = given["sm_scale"]
        self.queries = [slice(start, end) for start, end in pairwise(queries.tolist())]
        self.slots = [torch.arange(start, end) for start, end in pairwise(keys.tolist())]

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> None:
        self._attend(q, k, v, out)


class BatchMLAPagedAttentionWrapper(_Wrapper):
    def plan(self, *, metadata: tuple[Tensor, Tensor, Tensor, Tensor], page_size: int, **given: Any) -> None:
        assert self.options == {"backend": "fa3"}
        assert given["causal"] is False
        queries, offsets, pages, lengths = metadata
        self.scale, self.latent_dim = given["sm_scale"], given["head_dim_ckv"]
        self._lay_out(queries.tolist(), offsets, pages, lengths.tolist(), page_size)

    def run(self, *, query: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        entries = kv_cache.flatten(0, 1).unsqueeze(-2)
        self._attend(query, entries, entries[..., : self.latent_dim], out)


MODULES = {
    "flashinfer": SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
        BatchPrefillWithRaggedKVCacheWrapper=BatchPrefillWithRaggedKVCacheWrapper,
    ),
    "flashinfer.mla": SimpleNamespace(
        BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper,
        MLAPlanMetadata=SimpleNamespace(csr=lambda *rows: rows),
    ),
}
