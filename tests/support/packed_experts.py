"""Tiny checkpoints whose experts are stored as codes and scales."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sightline.kernels.packed_weights import FP8_BLOCK, WeightForm
from support.tiny_models import make_model

PACKED = {"gpt_oss": WeightForm.MXFP4, "deepseek_v3": WeightForm.FP8_BLOCKS}


def pack_experts(family: str, folder: Path) -> None:
    """Saves a tiny model whose experts are random codes and scales."""
    make_model(family).save_pretrained(folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    for name in [name for name in tensors if ".experts." in name and not name.endswith("bias")]:
        stored = tensors.pop(name)
        if PACKED[family] is WeightForm.MXFP4:
            experts, inputs, outputs = stored.shape
            shape = (experts, outputs, inputs // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 124, shape, generator=generator, dtype=torch.uint8)
        else:
            blocks = [-(-size // FP8_BLOCK) for size in stored.shape]
            tensors[name] = stored.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.rand(blocks, generator=generator) + 0.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    method = (
        {"quant_method": "mxfp4"} if family == "gpt_oss" else {"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
