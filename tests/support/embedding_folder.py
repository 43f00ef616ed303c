"""A tiny embedder as its publishers save one: BERT with random weights, a WordPiece vocabulary, mean pooling."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel

WEIGHTS = "model.safetensors"
CONFIG_FIELDS = (
    "architectures",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_norm_eps",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "type_vocab_size",
    "vocab_size",
)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("the", "a", "cat", "dog", "sat", "ran", "on", "mat", "sun", "is", "red", "blue", "and", "sky")
CLS, SEP = SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]")
HIDDEN_SIZE = 24
MAX_TOKENS = 16
"""Of a text, as the folder says."""


def vocabulary() -> dict[str, int]:
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)] + list("0123456789")
    entries = (*SPECIAL, *WORDS, *letters, *(f"##{letter}" for letter in letters))
    return {entry: index for index, entry in enumerate(dict.fromkeys(entries))}


def save_embedder(folder: Path, *, with_modules: bool = True) -> Path:
    """Makes the folder. Without modules it does not say how states become a vector."""
    vocab = vocabulary()
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=len(vocab),
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=40,
        max_position_embeddings=32,
        initializer_range=0.4,
    )
    folder.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in BertModel(config).state_dict().items()}, folder / WEIGHTS)
    described = config.to_dict() | {"architectures": ["BertModel"]}
    (folder / "config.json").write_text(json.dumps({name: described[name] for name in CONFIG_FIELDS}))
    backend = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(list(SPECIAL))
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    (folder / "tokenizer.json").write_text(backend.to_str())
    if with_modules:
        _save_modules(folder)
    return folder


def _save_modules(folder: Path) -> None:
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": HIDDEN_SIZE, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MAX_TOKENS}))
