"""Attention with Sightline's own Triton kernels."""
