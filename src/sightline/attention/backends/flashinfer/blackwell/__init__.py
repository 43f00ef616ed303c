"""Kernels of TRT-LLM and CuteDSL for Blackwell, reached through FlashInfer."""
