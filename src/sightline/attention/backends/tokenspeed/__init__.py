"""Latent attention with TokenSpeed MLA."""
