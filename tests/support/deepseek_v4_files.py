"""Tiny DeepSeek V4 checkpoints with the names and formats of the original repository."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = 16
"""The published blocks are of 128; so small a model would have one a matrix."""
QUANTIZATION: Mapping[str, object] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [BLOCK, BLOCK],
}
_IN_FP8 = re.compile(r"(\.wq_[ab]|\.attn\.wkv|\.wo_[ab]|shared_experts\.w[123])\.weight$")
_IN_FP4 = re.compile(r"\.experts\.\d+\.w[123]\.weight$")
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lowest three bits of a code stand for."""
_BESIDE = {"mtp.0.attn.wq_a.weight": torch.ones(4, 4), "mtp.0.e_proj.weight": torch.ones(2, 2)}


def original_name(saved: str) -> str:
    """The name in the original repository of what transformers saves."""
    name = saved.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes in fp8, factors that are powers of two, and what the two stand for."""
    num_blocks = [-(-size // BLOCK) for size in weight.shape]
    factors = torch.pow(2.0, torch.arange(num_blocks[0] * num_blocks[1]).remainder(3) - 1.0).view(num_blocks)
    wide = factors.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return codes, factors.to(torch.float8_e8m0fnu), codes.float() * wide


def in_rows(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes in fp4, two a byte, scales of 32 inputs each, and what the two stand for."""
    groups = weight.view(len(weight), -1, 32)
    scales = torch.pow(2.0, (groups.abs().amax(dim=-1) / 6.0).log2().ceil())
    ratio = groups / scales.unsqueeze(-1)
    magnitudes = (ratio.abs().unsqueeze(-1) - torch.tensor(_VALUES)).abs().argmin(dim=-1)
    codes = (magnitudes + 8 * (ratio < 0)).flatten(1)
    exact = torch.tensor(_VALUES)[magnitudes] * torch.where(ratio < 0, -1.0, 1.0) * scales.unsqueeze(-1)
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
    return packed, scales.to(torch.float8_e8m0fnu), exact.flatten(1)


def save_original(saved: Path, folder: Path, *, packed: bool) -> dict[str, Tensor]:
    """Writes the model that transformers saved as the original repository would; `packed` as published, in fp8 and fp4.

    Returns what the tensors stand for, by the names of transformers.
    """
    tensors: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for name, tensor in load_file(saved / "model.safetensors").items():
        original, exact[name] = original_name(name), tensor
        found = _IN_FP8.search(original), _IN_FP4.search(original)
        if packed and any(found):
            quantise = in_blocks if found[0] else in_rows
            codes, scales, exact[name] = quantise(tensor)
            tensors |= {original: codes, original.removesuffix("weight") + "scale": scales}
        else:
            tensors[original] = tensor
    save_file(tensors | _BESIDE, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((saved / "config.json").read_text())
    if packed:
        config |= {"quantization_config": QUANTIZATION, "expert_dtype": "fp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return exact
