"""Definitions of recurrent layers, and how checkpoints store them."""
