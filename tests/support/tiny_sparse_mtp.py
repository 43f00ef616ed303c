"""Tiny sparse models with modules for multi-token prediction, and what their parts in transformers give.

transformers has no such modules for these families: they are composed here from its decoder layers and norms.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from support.tiny_models import scale_weights
from support.tiny_mtp import Made, change_tensors, split_experts
from support.tiny_sparse import make_sparse

LAYER = 2
"""A layer with experts and an indexer of its own in every family, of which modules are made."""


class SparseModule(nn.Module):
    """A module of one depth."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config, layer, norm = model.config, model.model.layers[LAYER], type(model.model.norm)
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.block = type(layer)(config, LAYER)
        self.enorm, self.hnorm, self.head_norm = (norm(size, epsilon) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)

    def forward(self, model: PreTrainedModel, tokens: Tensor, states: Tensor) -> Tensor:
        """The states [num_places, hidden] behind its norm."""
        places = torch.arange(len(tokens))
        embedded = model.get_input_embeddings()(tokens)
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(states)), dim=-1)).unsqueeze(0)
        hidden = places.new_zeros(len(places), len(places), dtype=torch.float32)
        hidden.masked_fill_(places > places[:, None], torch.finfo(torch.float32).min)
        rotary = model.model.rotary_emb(joined, position_ids=places.unsqueeze(0))
        out = self.block(joined, attention_mask=hidden[None, None], position_embeddings=rotary)
        out = out[0] if isinstance(out, tuple) else out
        made: Tensor = self.head_norm(out)[0]
        return made


class SparseOracle:
    """A model and its modules, and the folder that both are saved in."""

    def __init__(self, family: str, num_modules: int, folder: Path) -> None:
        self.model, self.folder = make_sparse(family), folder
        self.modules = [SparseModule(self.model).eval() for _ in range(num_modules)]
        self.model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": num_modules}))
        for depth, module in enumerate(self.modules):
            scale_weights(module, seed=17 + depth)
            module.block.mlp.gate.e_score_correction_bias.normal_(std=0.3)
            change_tensors(folder, self._stored(module, f"model.layers.{self.model.config.num_hidden_layers + depth}"))

    def _stored(self, module: SparseModule, prefix: str) -> dict[str, Tensor]:
        stored = {f"{prefix}.embed_tokens.weight": self.model.get_input_embeddings().weight.detach().clone()}
        for name, tensor in module.state_dict().items():
            named = name.removeprefix("block.").replace("head_norm", "shared_head.norm")
            stored |= {f"{prefix}.{part}": own.clone() for part, own in split_experts(named, tensor).items()}
        return stored

    def depths(self, text: Sequence[int], num_places: int) -> list[Made]:
        """What the model and the module of each depth give at the first places of a text."""
        tokens = torch.tensor(text)
        with torch.no_grad():
            states = self.model.model(tokens[None, :num_places], use_cache=False).last_hidden_state[0]
            made = [Made(states, self.model.lm_head(states))]
            for depth, module in enumerate(self.modules, start=1):
                states = module(self.model, tokens[depth : depth + num_places], states)
                made.append(Made(states, self.model.lm_head(states)))
        return made


def as_sparse(folder: Path, target: Path, top_k: int) -> Path:
    """A saved DeepSeek V3 as a V3.2 whose indexers have random weights."""
    generator = torch.Generator().manual_seed(23)
    stored, heads, dim = load_file(folder / "model.safetensors"), 8, 12
    added: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        before, found, _ = name.partition(".q_a_proj.weight")
        if found:
            rank, size = tensor.shape
            shapes: dict[str, tuple[int, ...]] = {
                "wq_b.weight": (heads * dim, rank),
                "wk.weight": (dim, size),
                "weights_proj.weight": (heads, size),
                "k_norm.weight": (dim,),
                "k_norm.bias": (dim,),
            }
            for part, shape in shapes.items():
                added[f"{before}.indexer.{part}"] = torch.randn(shape, generator=generator)
    (target / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    change_tensors(target, added)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
    config |= {"index_n_heads": heads, "index_head_dim": dim, "index_topk": top_k}
    (target / "config.json").write_text(json.dumps(config))
    return target
