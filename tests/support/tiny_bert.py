"""Tiny random BERTs, with the files that an embedder has beside its weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors
from torch import Tensor
from transformers import BertConfig, BertModel, PreTrainedModel

from sightline.core.config import EngineConfig, Task
from sightline.core.ledger import Ledger
from sightline.engine.text_embedder import TextEmbedder, build_embedder
from sightline.models.loading.opening import open_checkpoint
from support.tiny_models import WEIGHT_SCALE

VOCAB = 97
POSITIONS = 64
CLS, SEP = 1, 2
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{index}" for index in range(4, VOCAB))]
"""By id."""


def make_bert(*, activation: str = "gelu", norm_epsilon: float = 0.05) -> BertModel:
    """With weights of a scale at which every feature matters, and a norm's epsilon that does too."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        intermediate_size=80,
        hidden_act=activation,
        max_position_embeddings=POSITIONS,
        type_vocab_size=2,
        layer_norm_eps=norm_epsilon,
        attn_implementation="eager",
    )
    model = BertModel(config).eval()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 0.0 if parameter.dim() > 1 else float(parameter.mean())
            parameter.copy_(centre + WEIGHT_SCALE * torch.randn(parameter.shape, generator=generator))
    return model


def save_embedder(
    model: PreTrainedModel,
    folder: Path,
    *,
    pooling: str = "mean",
    normalise: bool = True,
    max_tokens: int | None = None,
) -> Path:
    """The model with the files that say how its states become vectors."""
    model.save_pretrained(folder)
    write_modules(folder, pooling=pooling, normalise=normalise, max_tokens=max_tokens)
    return folder


def write_modules(
    folder: Path, *, pooling: str = "mean", normalise: bool = True, max_tokens: int | None = None
) -> None:
    """modules.json and what it speaks of, in the form that sentence-transformers wrote for years."""
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] if normalise else [])]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    names = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken", "max": "max_tokens"}
    switches = {f"pooling_mode_{name}": kind == pooling for kind, name in names.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48} | switches))
    if max_tokens is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_tokens}))


def write_tokenizer(folder: Path) -> None:
    """A word a token, [CLS] before a text and [SEP] after it."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[UNK]"])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    backend.save(str(folder / "tokenizer.json"))


def open_tiny(folder: Path, config: EngineConfig | None = None, *, strict: bool = True) -> TextEmbedder:
    """An embedder over scratch memory that starts as NaN, from token ids unless there is a tokenizer."""
    ledger = Ledger(strict=strict)
    wishes = replace(
        config or EngineConfig(),
        task=Task.EMBED.value,
        dtype="float32",
        paranoid=True,
        skip_tokenizer_init=not (folder / "tokenizer.json").is_file(),
    )
    return build_embedder(wishes, open_checkpoint(folder, ledger), ledger)


def vectors(embedder: TextEmbedder, texts: Sequence[Sequence[int]]) -> Tensor:
    """[num_texts, size], in order."""
    return torch.stack([found.vector for found in embedder.embed_tokens(texts)])


def reference_states(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """[len(tokens), hidden_size]: transformers' last hidden states of one text alone."""
    with torch.no_grad():
        states: Tensor = model(torch.tensor([list(tokens)])).last_hidden_state[0]
    return states


def reference_vector(model: PreTrainedModel, tokens: Sequence[int], pooling: str, *, normalise: bool = True) -> Tensor:
    """[hidden_size]: pooled as sentence-transformers does."""
    states = reference_states(model, tokens)
    pooled = {"mean": states.mean(0), "cls": states[0], "lasttoken": states[-1]}[pooling]
    return torch.nn.functional.normalize(pooled, dim=0) if normalise else pooled
