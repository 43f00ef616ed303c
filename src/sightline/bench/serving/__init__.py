"""Benchmark of an OpenAI-compatible server under load."""
