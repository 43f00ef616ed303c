"""Attention on a CPU with compiled kernels that read pages in place."""
