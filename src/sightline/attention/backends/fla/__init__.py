"""Recurrent layers with fla-core, the kernels of flash-linear-attention."""
