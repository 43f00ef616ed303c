"""Embedding of whole files of texts."""
