"""Prompts of Kimi delta attention with fla-core's kernels: the steps of its `chunk_kda_fwd`, called one by one.

The function bounds no decays, writes zeros before its outputs, and takes no place for these. With a decay per channel,
a pass over all decays and two over all outputs take a tenth of the time, so our own kernel sums bounded decays, and the
last of the library's kernels writes where the layer wants its outputs.
"""

from __future__ import annotations

import torch
from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
from fla.ops.gla.chunk import chunk_gla_fwd_kernel_o
from fla.ops.kda.chunk_intra import chunk_kda_fwd_intra
from fla.ops.utils import prepare_chunk_indices
from fla.ops.utils.constant import RCP_LN2
from torch import Tensor

from sightline.attention.recurrent.waves import Borders, WaveInputs, aligned
from sightline.kernels.triton.decay_sums import decay_sums

CHUNK = 64


def kimi_prompts(
    given: WaveInputs, borders: Borders, first: Tensor, *, scale: float, least: float
) -> tuple[Tensor, Tensor]:
    """See `SegmentKernel`; states are [segments, num_heads, key_dim, value_dim]. No decay is stronger than `least`."""
    _, num_heads, value_dim = given.v.shape
    _, key_heads, key_dim = given.q.shape
    cut = prepare_chunk_indices(borders.device, CHUNK, cu_seqlens_cpu=borders.host)
    sums = torch.empty(given.decay.shape, dtype=torch.float32, device=first.device)
    decay_sums(given.decay, borders.device, cut, sums, chunk=CHUNK, scale=RCP_LN2, least=least)
    q, k, v, sums = (each.unsqueeze(0) for each in (given.q, given.k, given.v, sums))
    beta = aligned(given.beta).unsqueeze(0)
    segments = {"cu_seqlens": borders.device, "chunk_size": CHUNK, "chunk_indices": cut}
    w, u, _, keys, scores, _ = chunk_kda_fwd_intra(q=q, k=k, v=v, gk=sums, beta=beta, scale=scale, **segments)
    states, stored, behind = chunk_gated_delta_rule_fwd_h(
        k=keys,
        w=w,
        u=u,
        gk=sums,
        initial_state=first,
        output_final_state=True,
        cu_seqlens_cpu=borders.host,
        **segments,
    )
    out = torch.empty_like(given.v) if given.place is None else given.place
    chunk_gla_fwd_kernel_o[lambda meta: (-(-value_dim // meta["BV"]) * cut.shape[0], num_heads)](
        q=q,
        v=stored,
        g=sums,
        h=states,
        o=out,
        A=scores,
        cu_seqlens=borders.device,
        chunk_indices=cut,
        scale=scale,
        T=given.v.shape[0],
        H=key_heads,
        HV=num_heads,
        K=key_dim,
        V=value_dim,
        BT=CHUNK,
        STATE_V_FIRST=False,
    )
    return out, behind
