"""Sparse attention: what indexers choose, and where the chosen entries are."""
