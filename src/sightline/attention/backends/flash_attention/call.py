"""The only caller of FlashAttention 4: ragged queries over ragged or paged keys.

Owns which parts of its interface are used and how its terms map to ours. A configuration takes seconds to compile when
it is first called. Besides dtype, heads and head dimensions, it depends on

    whether a call is causal    paged keys    a window    a softcap, and which    sinks, and their dtype    an LSE
    more than 256 rows

and never on a length: `max_seqlen_q` is not passed, because the library would compile one more for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from flash_attn.cute.interface import _flash_attn_fwd
from torch import Tensor

TILE_WIDTHS = frozenset({64, 80, 96, 112, 128, 144})
"""Keys per tile. Pages of exactly this size are loaded whole, and a weight of 0 does not mask NaN in unwritten
slots."""


class RaggedKeys(NamedTuple):
    """Keys and values row after row: k [num_keys, kv_heads, head_dim], v [num_keys, kv_heads, value_dim].

    A tile at a row's end holds keys of the next row, whose values must be finite. The tensors must end where the last
    row does; the kernel reads zeros beyond it.
    """

    k: Tensor
    v: Tensor
    offsets: Tensor
    """[num_rows + 1] int32."""

    def places(self) -> dict[str, Tensor]:
        """Keyword arguments that locate each row's keys, under the library's names."""
        return {"cu_seqlens_k": self.offsets}


class PagedKeys(NamedTuple):
    """Keys and values in pages: both [num_pages, page_size, kv_heads, head_dim]."""

    k: Tensor
    v: Tensor
    pages: Tensor
    """[num_rows, most] int32."""
    lens: Tensor
    """[num_rows] int32: keys per row, new ones included."""

    def places(self) -> dict[str, Tensor]:
        """Keyword arguments that locate each row's keys, under the library's names."""
        return {"page_table": self.pages, "seqused_k": self.lens}


def kernel_page_size(page_size: int) -> int:
    """The largest divisor of the page size that is not a tile width; pages are split to this size for the kernel."""
    return max(size for size in range(1, page_size + 1) if page_size % size == 0 and size not in TILE_WIDTHS)


@dataclass(frozen=True)
class FlashAttention:
    """Settings shared by all calls of a layer group."""

    scale: float
    window: int | None = None
    softcap: float | None = None

    def __call__(
        self,
        q: Tensor,
        query_offsets: Tensor,
        keys: RaggedKeys | PagedKeys,
        out: Tensor,
        *,
        causal: bool,
        needs_lse: bool,
        sinks: Tensor | None = None,
    ) -> Tensor | None:
        """Fills out [num_tokens, heads, value_dim] for q [num_tokens, heads, head_dim], except for tokens of no row.

        query_offsets [num_rows + 1] int32. Masks are aligned to the end of the keys. If `needs_lse`, returns the LSE
        [num_tokens, heads] fp32, a view of [heads, num_tokens].
        """
        # The library's window excludes the query itself, ours includes it.
        reach = None if self.window is None else self.window - 1
        lse: Tensor | None
        _, lse, *_ = _flash_attn_fwd(
            q,
            keys.k,
            keys.v,
            cu_seqlens_q=query_offsets,
            softmax_scale=self.scale,
            causal=causal,
            softcap=self.softcap,
            window_size_left=reach,
            window_size_right=None if causal else reach,
            learnable_sink=sinks,
            num_splits=1,
            return_lse=needs_lse,
            out=out,
            **keys.places(),
        )
        if lse is None:
            return None
        if sinks is not None:
            # The kernel adds sinks at the scale of the largest score, which overflows if all scores are far below the
            # sink.
            lse = torch.where(lse == torch.inf, sinks.float().unsqueeze(1), lse)
        return lse.transpose(0, 1)
