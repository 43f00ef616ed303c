"""The cache write and the projection of `kernels/triton` in torch, for backends that are tried without Triton."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts these where the import of the kernels finds them."""
    kernels = {"write": (write_keys_values, write_latents), "project": (project_real,), "pages": (list_pages,)}
    for name, functions in kernels.items():
        module = ModuleType(f"sightline.kernels.triton.{name}")
        vars(module).update({function.__name__: function for function in functions})
        monkeypatch.setitem(sys.modules, module.__name__, module)


def write_keys_values(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    _write(keys, slots, k, k_scale)
    _write(values, slots, v, v_scale)


def write_latents(latent: Tensor, k_rope: Tensor, entries: Tensor, slots: Tensor, scale: Tensor | None = None) -> None:
    _write(entries, slots, torch.cat((latent, k_rope), dim=-1), scale)


def project_real(
    given: Tensor, up: Tensor, num_real: Tensor, out: Tensor, *, beside: Tensor | None = None, overlaps: bool = False
) -> None:
    del overlaps
    real, outputs = int(num_real), up.shape[1]
    out[:real, :, :outputs] = torch.einsum("thk,hnk->thn", given[:real].float(), up.float()).to(out.dtype)
    if beside is not None:
        out[:real, :, outputs:] = beside[:real]


def list_pages(table: Tensor, rows: Tensor, most: int, out: Tensor) -> None:
    for place, count, start in rows.T.tolist():
        assert count <= most, "a row has more pages than the launch is for"
        out[start : start + count] = table[place, :count]


def _write(plane: Tensor, slots: Tensor, entries: Tensor, scale: Tensor | None) -> None:
    if (scale is not None) != (plane.dtype == torch.float8_e4m3fn):
        raise ValueError(f"expected a scale exactly for an fp8 plane, got {plane.dtype} with {scale}")
    if scale is None:
        plane[slots] = entries.to(plane.dtype)
        return
    # torch's cast makes NaN of what is too large.
    stored = (entries.float() / scale).clamp(-448, 448).to(plane.dtype)
    plane.view(torch.uint8)[slots] = stored.view(torch.uint8)
