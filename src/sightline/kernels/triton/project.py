"""Values of what heads found of the latents, for the tokens that are real: the output of padding stays as it is.

Owns one batched product. How many tokens are real, only the device needs to know.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.triton.numbers import product

_BLOCK = 64
"""Latents of a step of the product."""


def project_real(found: Tensor, value_up: Tensor, num_real: Tensor, out: Tensor) -> None:
    """Writes out [num_tokens, heads, value] of found [num_tokens, heads, latent] with value_up [heads, value, latent].

    Only the first `num_real` [1] int64 tokens are read and written. Of `found` and `out` the last dimension is
    contiguous; value_up may lie in memory anyhow.
    """
    num_tokens, num_heads, latent_dim = found.shape
    if num_tokens == 0:
        return
    value_dim = value_up.shape[1]
    is_wide = found.dtype is torch.float32
    # No tensor cores for what is wide: the product's operands live in registers.
    tokens = 16 if is_wide else min(64, max(16, triton.next_power_of_2(num_tokens)))
    # Few tokens: more programs share a head, since one alone waits for its weights most of the time.
    widest = 16 if is_wide else 32 if num_tokens <= 16 else 64
    values = min(max(16, triton.next_power_of_2(value_dim)), widest)
    _project_kernel[(num_heads, triton.cdiv(num_tokens, tokens), triton.cdiv(value_dim, values))](
        found,
        value_up,
        num_real,
        out,
        *(*found.stride()[:2], *value_up.stride(), *out.stride()[:2]),
        LATENT_DIM=latent_dim,
        VALUE_DIM=value_dim,
        TOKENS=tokens,
        VALUES=values,
        BLOCK=min(_BLOCK, max(16, triton.next_power_of_2(latent_dim))),
        INTERPRETED=found.device.type == "cpu",
        num_warps=4,
        num_stages=1 if is_wide else 4,
    )


@triton.jit
def _project_kernel(
    found, value_up, num_real, out,
    found_token, found_head, up_head, up_value, up_latent, out_token, out_head,
    LATENT_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Some tokens and values of one head."""
    head = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TOKENS
    real = tl.load(num_real)
    if first < real:
        token = (first + tl.arange(0, TOKENS)).to(tl.int64)
        value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
        dim = tl.arange(0, BLOCK)
        is_real, is_value = token < real, value < VALUE_DIM
        rows = found + head * found_head + token[:, None] * found_token
        columns = value_up + head * up_head + value[None, :] * up_value
        gathered = tl.zeros([TOKENS, VALUES], tl.float32)
        for start in range(0, LATENT_DIM, BLOCK):
            inside = start + dim < LATENT_DIM
            a = tl.load(rows + start + dim[None, :], mask=is_real[:, None] & inside[None, :], other=0.0)
            b = tl.load(
                columns + (start + dim)[:, None] * up_latent, mask=inside[:, None] & is_value[None, :], other=0.0
            )
            gathered = product(a, b, gathered, INTERPRETED)
        place = out + head * out_head + token[:, None] * out_token + value[None, :]
        tl.store(place, gathered.to(out.dtype.element_ty), mask=is_real[:, None] & is_value[None, :])
