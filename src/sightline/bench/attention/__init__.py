"""Attention backends and peers, measured on the same shapes."""
