"""Attention with FlashInfer."""
