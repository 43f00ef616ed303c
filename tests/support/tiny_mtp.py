"""Tiny models with modules for multi-token prediction, saved as checkpoints store them, and what transformers gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from support.tiny_models import make_model, scale_weights


class Made(NamedTuple):
    """What a network gives for each place of a text."""

    states: Tensor
    logits: Tensor


class Oracle(NamedTuple):
    """A model and its modules in transformers, and the folder that both are saved in."""

    model: PreTrainedModel
    modules: MtpModel
    folder: Path

    def depths(self, text: Sequence[int], num_places: int) -> list[Made]:
        """What the model and the module of each depth give at the first places of a text, in one forward each.

        The text needs as many tokens more as there are modules.
        """
        last = self.model.config.num_hidden_layers - 1
        with torch.no_grad():
            # What MTPCandidateGenerator asks the model for.
            given = self.model(
                torch.tensor([text[:num_places]]), output_hidden_states=[last], use_cache=False, return_dict=True
            )
            states = given.hidden_states[-1]
            made = [Made(states[0], given.logits[0])]
            for depth in range(1, len(self.modules.layers) + 1):
                tokens = torch.tensor([text[depth : depth + num_places]])
                positions = torch.arange(depth, depth + num_places).unsqueeze(0)
                states = self.modules.forward_layer(depth - 1, states, positions, None, input_ids=tokens)
                made.append(Made(states[0], self.modules._project_to_logits(states)[0]))
        return made


def save_with_modules(family: str, num_modules: int, folder: Path) -> Oracle:
    """A tiny model of the family with random modules."""
    return save_model_with_modules(make_model(family), num_modules, folder)


def save_model_with_modules(model: PreTrainedModel, num_modules: int, folder: Path) -> Oracle:
    """The model with random modules. The oracle reads the modules back from the folder."""
    model.config.num_mtp_layers = num_modules
    model.save_pretrained(folder)
    modules = MtpModel(model, num_modules)
    scale_weights(modules.layers, seed=17)
    generator = torch.Generator().manual_seed(19)
    for name, buffer in modules.layers.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3, generator=generator)
    change_tensors(folder, stored_modules(model, modules))
    model.config.name_or_path = str(folder)
    model.config.dtype = torch.float32
    # By which transformers knows the tensors of modules: it lists the numbers of published layers only.
    first = model.config.num_hidden_layers
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{first + depth}\." for depth in range(num_modules)]
    return Oracle(model, MtpModel.from_pretrained(model).eval(), folder)


def change_tensors(folder: Path, added: dict[str, Tensor], removed: str | None = None) -> None:
    """Adds tensors to a saved model, or replaces them; first removes those whose names begin so."""
    file = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if removed is None or not name.startswith(removed)}
    save_file(kept | added, file, {"format": "pt"})


def stored_modules(model: PreTrainedModel, modules: MtpModel) -> dict[str, Tensor]:
    """The tensors of the modules under the names of checkpoints, with the copies that those have."""
    stored: dict[str, Tensor] = {}
    for depth, layer in enumerate(modules.layers):
        prefix = f"model.layers.{model.config.num_hidden_layers + depth}"
        stored[f"{prefix}.embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
        stored[f"{prefix}.shared_head.head.weight"] = model.lm_head.weight.detach().clone()
        for name, tensor in layer.state_dict().items():
            as_stored = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
            for part, own in split_experts(as_stored, tensor).items():
                stored[f"{prefix}.{part}"] = own.clone()
    return stored


def split_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensor of each expert, if transformers has joined them."""
    before, _, part = name.partition(".experts.")
    if part not in ("gate_up_proj", "down_proj"):
        return {name: tensor}
    split: dict[str, Tensor] = {}
    for number, expert in enumerate(tensor):
        parts = {"down_proj": expert}
        if part == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
        split |= {f"{before}.experts.{number}.{each}.weight": own for each, own in parts.items()}
    return split
