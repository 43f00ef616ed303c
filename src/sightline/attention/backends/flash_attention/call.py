"""The one way in which FlashAttention 4 is called: ragged queries over ragged or paged keys.

Owns what of its interface is used, and how its words are ours. A configuration is compiled when it is first called, for
seconds; what makes one, beyond dtype, heads and head dimensions, is whether

    a call is causal    keys are paged    there is a window    a softcap, and which    sinks, and their dtype    an LSE
    there are more than 256 rows

and never a length: `max_seqlen_q` is not given, from which the library would make one more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from flash_attn.cute.interface import _flash_attn_fwd
from torch import Tensor

TILE_WIDTHS = frozenset({64, 80, 96, 112, 128, 144})
"""Keys of a tile. Pages of just that size are loaded whole, and a weight of 0 does not silence what nobody wrote."""


class RaggedKeys(NamedTuple):
    """Keys and values row after row: k [num_keys, kv_heads, head_dim], v [num_keys, kv_heads, value_dim].

    A tile at a row's end holds keys of the next row, whose values must be numbers, and zeros behind the last: the
    tensors end where the last row does.
    """

    k: Tensor
    v: Tensor
    offsets: Tensor
    """[num_rows + 1] int32."""

    def places(self) -> dict[str, Tensor]:
        """Where each row's are, in the library's words."""
        return {"cu_seqlens_k": self.offsets}


class PagedKeys(NamedTuple):
    """Keys and values in pages: both [num_pages, page_size, kv_heads, head_dim]."""

    k: Tensor
    v: Tensor
    pages: Tensor
    """[num_rows, most] int32."""
    lens: Tensor
    """[num_rows] int32: keys of each row, the new ones included."""

    def places(self) -> dict[str, Tensor]:
        """Where each row's are, in the library's words."""
        return {"page_table": self.pages, "seqused_k": self.lens}


def kernel_page_size(page_size: int) -> int:
    """The largest part of a page that is not as large as a tile: pages are given to the kernel cut into those."""
    return max(size for size in range(1, page_size + 1) if page_size % size == 0 and size not in TILE_WIDTHS)


@dataclass(frozen=True)
class FlashAttention:
    """What all calls of a layer group share."""

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
        """Fills out [num_tokens, heads, value_dim] for q [num_tokens, heads, head_dim], but for tokens of no row.

        query_offsets [num_rows + 1] int32. Masks are aligned to the end of the keys. Returns the LSE
        [num_tokens, heads] fp32 where it is needed, a view of [heads, num_tokens].
        """
        # Theirs counts the keys beside the query, ours the query too.
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
            # Sinks are added at the scale of the largest score: beside scores that are far below, that overflows.
            lse = torch.where(lse == torch.inf, sinks.float().unsqueeze(1), lse)
        return lse.transpose(0, 1)
