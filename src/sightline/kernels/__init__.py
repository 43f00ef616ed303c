"""Tensors in, tensors out. Knows nothing of batches, plans or models."""
