"""A tiny model with a tokenizer of its own, as `sightline serve` wants it."""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from support.tiny_tokenizers import save_folder, train_byte_level


def save_tiny_served_model(folder: Path) -> Path:
    """Makes the folder: one layer with random weights, and a context of 1,024 tokens."""
    tokenizer = train_byte_level()
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    save_folder(tokenizer, folder, bos="<|bos|>", eos="<|eos|>")
    return folder
