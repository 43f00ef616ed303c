"""Attention with FlashAttention 4."""
