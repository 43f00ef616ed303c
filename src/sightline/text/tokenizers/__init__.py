"""Tokenizers, from Hugging Face folders and from GGUF files."""
