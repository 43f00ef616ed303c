"""Stands for the recurrent operations of fla-core 0.6.0 and FlashInfer 0.7.2 on a CPU.

Takes their arguments by their names, refuses what they refuse, and computes token by token as the oracle does. Like
fla-core, it remembers the borders of segments by the identity of the tensor that they came in. Our own kernels in front
of the libraries are in torch here, too.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from sightline.attention.contract import ConvWeights
from sightline.attention.oracle.recurrent import convolve_row
from sightline.attention.spec import UNIT_EPSILON
from sightline.kernels.triton.recurrent_tokens import TokenRows, TokenSlots
from sightline.kernels.triton.short_convolution import Convolution, Split
from support.stand_in_kimi import (
    RCP_LN2,
    chunk_gated_delta_rule_fwd_h,
    chunk_gla_fwd_kernel_o,
    chunk_kda_fwd_intra,
    decay_sums,
    prepare_chunk_indices,
)
from support.stand_in_segments import borders_of, forget_borders, recur_segments

TILE = 64
"""Tokens that FlashInfer's kernels read at once."""


def _fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    assert g is not None, "the backends give a decay"
    if cu_seqlens is None:
        borders = [row * q.shape[1] for row in range(q.shape[0] + 1)]
    else:
        assert q.shape[0] == 1, "the batch size is expected to be 1 when using `cu_seqlens`"
        borders = borders_of(cu_seqlens)
    assert borders[-1] == q.shape[0] * q.shape[1]
    assert cu_seqlens_cpu is None or cu_seqlens_cpu.tolist() == borders
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert g.dtype == torch.float32
    assert not g.isinf().any(), "differences of infinite sums are not numbers"
    shape = (len(borders) - 1, v.shape[2], q.shape[3], v.shape[3])
    first = torch.zeros(shape) if initial_state is None else initial_state
    assert first.shape == shape
    assert first.dtype == torch.float32
    tokens = [None if each is None else each.flatten(0, 1) for each in (q, k, v, g, beta)]
    used: Any = (*tokens, q.shape[-1] ** -0.5 if scale is None else scale, first, borders)
    out, states = recur_segments(*used)
    return out.view_as(v), states if output_final_state else None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    unused = use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, chunk_indices
    assert not any((*unused, cp_context, kwargs))
    assert beta.shape == g.shape == v.shape[:3]
    return _fla(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    unused = gk, gv, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel
    assert not any((*unused, allow_neg_eigval, state_v_first, kwargs))
    assert g is not None
    assert beta is not None
    assert beta.shape == g.shape == v.shape[:3]
    return _fla(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    unused = use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate
    more = lower_bound, disable_recompute, return_intermediate_states, state_v_first, cp_context, use_graph
    assert not any((*unused, *more, max_num_seqs, kwargs))
    assert g.shape == (*v.shape[:3], q.shape[3])
    assert beta.shape == v.shape[:3]
    return _fla(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    unused = A_log, dt_bias, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel
    assert not any((*unused, allow_neg_eigval, lower_bound, state_v_first, kwargs))
    assert g.shape == (*v.shape[:3], q.shape[3])
    assert beta.shape == v.shape[:3]
    return _fla(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens)


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    assert not any((g_gamma, state_v_first, kwargs))
    assert g is not None
    assert q.shape[2] == v.shape[2], "there is one query for each head"
    assert g.shape == v.shape[:3]
    return _fla(q, k, v, g, None, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu)


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    assert not any((g_gamma, reverse, state_v_first, kwargs))
    assert g is not None
    assert q.shape[2] == v.shape[2], "there is one query for each head"
    return _fla(q, k, v, g, None, scale, initial_state, output_final_state, cu_seqlens)


def flashinfer_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: str | bool = "auto",
    state_indices: Tensor | None = None,
    _cp_chunk_len: int | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    unused = use_qk_l2norm_in_kernel, state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens, state_indices
    assert not any((*unused, _cp_chunk_len))
    assert (use_cp, backend) == ("auto", "auto")
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "states": initial_state, "borders": cu_seqlens}
    for name, each in given.items():
        assert each is not None, name
        assert each.is_contiguous(), f"{name} must be contiguous"
    assert g is not None
    assert beta is not None
    assert initial_state is not None
    assert cu_seqlens is not None
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert g.dtype == beta.dtype == initial_state.dtype == torch.float32
    assert q.shape[2] == k.shape[2] == v.shape[2] == 128, "DSL kernel only supports D=128"
    assert g.shape == beta.shape == v.shape[:2]
    assert not (g < 0).any(), "what is left of a state is not a logarithm"
    refuse_misaligned({**given, "output": output, "output_state": output_state})
    borders = cu_seqlens.tolist()
    assert max_seqlen == max(stop - start for start, stop in itertools.pairwise(borders))
    # As in the kernel, nothing is left of a state below 1e-10.
    decay = torch.log(g + 1e-10)
    out, states = recur_segments(q, k, v, decay, beta, scale or 128**-0.5, initial_state.mT, borders)
    spread_beyond(k, v, borders, out, states)
    if output is not None:
        assert output.is_contiguous()
        assert (output.shape, output.dtype) == (v.shape, v.dtype)
        out = output.copy_(out)
    if not output_final_state:
        return out
    turned = states.mT.contiguous()
    return out, turned if output_state is None else output_state.copy_(turned)


def refuse_misaligned(given: Mapping[str, Tensor | None]) -> None:
    """As the call into a compiled kernel does, which was compiled for pointers to whole 16 bytes."""
    for name, each in given.items():
        align = 8 if name == "borders" else 16
        if each is not None and each.data_ptr() % align:
            raise ValueError(f"Misaligned Tensor data on argument {name}, expected data alignment={align} bytes")


def spread_beyond(k: Tensor, v: Tensor, borders: list[int], out: Tensor, states: Tensor) -> None:
    """Segments are read in whole tiles. What is read behind the end of one is multiplied by 0, which leaves NaN."""
    group = v.shape[1] // k.shape[1]
    for segment, (start, stop) in enumerate(itertools.pairwise(borders)):
        tile = start + (stop - start - 1) // TILE * TILE
        beyond = slice(stop, tile + TILE)
        for head in range(v.shape[1]):
            read = torch.cat((k[beyond, head // group], v[beyond, head]))
            if not read.isfinite().all():
                out[tile:stop, head] = torch.nan
                states[segment, head] = torch.nan


def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    A_log: Tensor,  # noqa: N803
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    assert not use_qk_l2norm
    assert backend == "auto"
    assert q.shape[1] == 1
    assert q.dtype == k.dtype == v.dtype == a.dtype == b.dtype
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert state.shape == (q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    decay = -torch.exp(A_log) * torch.nn.functional.softplus(a.float() + dt_bias)
    tokens = [each.squeeze(1) for each in (q, k, v, decay, b.float().sigmoid())]
    used: Any = (*tokens, q.shape[-1] ** -0.5 if scale is None else scale, state, list(range(q.shape[0] + 1)))
    out, states = recur_segments(*used)
    state.copy_(states)
    return out.unsqueeze(1) if output is None else output.copy_(out.unsqueeze(1)), state


def split_mixed(
    mixed: Tensor,
    convolution: Convolution | None,
    slots: TokenSlots | None,
    tokens: TokenRows,
    out: Split,
    *,
    unit: bool,
    overlaps: bool = False,
    spoiled: Tensor | None = None,
) -> None:
    """Our own kernel of this name, in torch."""
    del overlaps
    for row, (start, stop) in enumerate(itertools.pairwise(tokens.offsets.tolist())):
        if start == stop:
            continue
        x = mixed[start:stop].float()
        if convolution is not None:
            weight, bias, tails = convolution
            tail = torch.zeros(weight.shape[0], weight.shape[1] - 1)
            if tails is not None and slots is not None:
                tail = tails[slots.read[row]]
            found = convolve_row(x, ConvWeights(weight, bias), tail)
            x = torch.nn.functional.silu(found.out)
            for place, slot in enumerate([] if slots is None or tails is None else slots.write[start:stop].tolist()):
                if slot and tails is not None:
                    tails[slot] = found.tails[place]
        sizes = [each[0].numel() for each in out]
        for part, target, is_unit in zip(torch.split(x, sizes, dim=1), out, (unit, unit, False), strict=True):
            heads = part.view(target[start:stop].shape)
            length = torch.sqrt((heads * heads).sum(-1, keepdim=True) + UNIT_EPSILON)
            target[start:stop] = heads / length if is_unit else heads
        if spoiled is not None:
            parts = out.k[start:stop], out.v[start:stop]
            is_finite = torch.cat([part.isfinite().all(-1) for part in parts], dim=1)
            spoiled[start:stop] = torch.where(is_finite, 0.0, torch.nan)
            for part in parts:
                part[~part.isfinite()] = 0.0


def find_tokens(query_lens: Tensor, tokens: TokenRows) -> None:
    """Our own kernel of this name, in torch."""
    tokens.offsets[0] = 0
    tokens.offsets[1:] = query_lens.cumsum(0)
    tokens.rows.fill_(-1)
    for row, (start, stop) in enumerate(itertools.pairwise(tokens.offsets.tolist())):
        tokens.rows[start:stop] = row


FLASHINFER: dict[str, Callable[..., Any]] = {
    "gdn_prefill": flashinfer_chunk_gated_delta_rule,
    "gdn_decode": gated_delta_rule_decode,
}
FLA: dict[str, tuple[tuple[str, Callable[..., Any]], ...]] = {
    "fla.ops.gated_delta_rule": (
        ("chunk", chunk_gated_delta_rule),
        ("fused_recurrent", fused_recurrent_gated_delta_rule),
    ),
    "fla.ops.kda": (
        ("chunk", chunk_kda),
        ("fused_recurrent", fused_recurrent_kda),
        ("chunk_intra", chunk_kda_fwd_intra),
    ),
    "fla.ops.common": (("chunk_delta_h", chunk_gated_delta_rule_fwd_h),),
    "fla.ops.utils": (("index", prepare_chunk_indices),),
    "fla.ops.simple_gla": (("chunk", chunk_simple_gla), ("fused_recurrent", fused_recurrent_simple_gla)),
}
"""For each module, the files in it and the functions that these hold."""
INNER: dict[str, dict[str, object]] = {
    "fla.ops.kda.chunk_intra": {"chunk_kda_fwd_intra": chunk_kda_fwd_intra},
    "fla.ops.common.chunk_delta_h": {"chunk_gated_delta_rule_fwd_h": chunk_gated_delta_rule_fwd_h},
    "fla.ops.gla": {},
    "fla.ops.gla.chunk": {"chunk_gla_fwd_kernel_o": chunk_gla_fwd_kernel_o},
    "fla.ops.utils.constant": {"RCP_LN2": RCP_LN2},
}
"""Modules of fla-core that are imported by their own names, and what they hold."""


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the stand-ins where imports of the libraries find them, and our kernels where the adapters find them."""
    forget_borders()
    modules = {name: ModuleType(name) for name in ("fla", "fla.ops", *FLA, *INNER, "flashinfer")}
    for module in modules.values():
        module.__path__ = []
    for name, held in INNER.items():
        vars(modules[name]).update(held)
    for name, functions in FLA.items():
        vars(modules[name]).update({function.__name__: function for _, function in functions})
    for file, function in FLASHINFER.items():
        modules[f"flashinfer.{file}"] = ModuleType(f"flashinfer.{file}")
        vars(modules[f"flashinfer.{file}"])[function.__name__.removeprefix("flashinfer_")] = function
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("sightline.attention.recurrent.waves.split_mixed", split_mixed)
    monkeypatch.setattr("sightline.attention.recurrent.planned_tokens.find_tokens", find_tokens)
    monkeypatch.setattr("sightline.kernels.triton.decay_sums.decay_sums", decay_sums)
