"""Stands for the steps of fla-core 0.6.0's `chunk_kda_fwd` on a CPU, and for our kernel in front of them.

The first step takes everything and passes it on, the second computes, and the last writes the outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from support.stand_in_segments import borders_of, recur_segments

RCP_LN2 = 1.4426950216


@dataclass(frozen=True, eq=False)
class _KimiChunks:
    """What the first of the library's kernels takes, and the outputs that the next one finds."""

    tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    """Queries, keys, values, decays and betas."""
    scale: float
    out: Tensor | None = None


def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    borders = borders_of(cu_seqlens)
    assert cu_seqlens_cpu is None or cu_seqlens_cpu.tolist() == borders
    lens = [stop - start for start, stop in itertools.pairwise(borders)]
    pairs = [[segment, chunk] for segment, length in enumerate(lens) for chunk in range(-(-length // chunk_size))]
    return torch.tensor(pairs, dtype=torch.int64)


def chunk_kda_fwd_intra(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    use_graph: bool = False,
) -> tuple[_KimiChunks, None, None, None, None, None]:
    assert not any((safe_gate, lower_bound, disable_recompute, use_graph))
    assert gk is not None
    assert beta is not None
    assert scale is not None
    assert cu_seqlens is not None
    assert chunk_indices is not None
    given = (q, k, v, gk, beta)
    assert all(each.shape[0] == 1 and each.is_contiguous() for each in given)
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert gk.dtype == beta.dtype == torch.float32
    assert gk.shape == (*v.shape[:3], q.shape[3])
    assert not gk.isinf().any(), "differences of infinite sums are not numbers"
    borders, sums = borders_of(cu_seqlens), gk[0] / RCP_LN2
    decay = sums.clone()
    for segment, chunk in chunk_indices.tolist():
        first = borders[segment] + chunk * chunk_size
        tokens = slice(first, min(first + chunk_size, borders[segment + 1]))
        decay[tokens][1:] = sums[tokens].diff(dim=0)
    return _KimiChunks((q[0], k[0], v[0], decay, beta[0]), scale), None, None, None, None, None


def chunk_gated_delta_rule_fwd_h(
    k: Tensor | None,
    w: _KimiChunks,
    u: Tensor | None,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    save_new_value: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
) -> tuple[_KimiChunks, None, Tensor]:
    assert (g, chunk_offsets, chunk_size, state_v_first) == (None, None, 64, False)
    assert save_new_value
    assert output_final_state
    assert gk is not None
    assert chunk_indices is not None
    assert initial_state is not None
    assert cu_seqlens is not None
    assert initial_state.is_contiguous()
    out, states = recur_segments(*w.tokens, w.scale, initial_state, borders_of(cu_seqlens))
    return replace(w, out=out), None, states


class chunk_gla_fwd_kernel_o:  # noqa: N801
    """A kernel: called with a grid first."""

    def __class_getitem__(cls, grid: Callable[[dict[str, int]], tuple[int, int]]) -> Callable[..., None]:
        def launch(**given: Any) -> None:
            chunks, out, (_, _, v, *_) = given["h"], given["o"], given["h"].tokens
            num_tokens, heads, dim = v.shape
            assert (given["T"], given["HV"], given["V"], given["BT"]) == (num_tokens, heads, dim, 64)
            assert (given["scale"], given["STATE_V_FIRST"]) == (chunks.scale, False)
            assert grid({"BV": dim}) == (given["chunk_indices"].shape[0], heads)
            assert out.is_contiguous()
            out.copy_(chunks.out)

        return launch


def decay_sums(
    decay: Tensor, borders: Tensor, chunks: Tensor, out: Tensor, *, chunk: int, scale: float, least: float
) -> None:
    """Our own kernel of this name, in torch."""
    for segment, number in chunks.tolist():
        start, stop = borders[segment : segment + 2].tolist()
        tokens = slice(start + number * chunk, min(start + (number + 1) * chunk, stop))
        out[tokens] = decay[tokens].clamp(min=least).cumsum(0) * scale
