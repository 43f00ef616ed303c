"""Recurrent layers and convolutions in torch: rows cut into segments, and two ways to compute them."""
