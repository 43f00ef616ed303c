"""Benchmarks: attention, whole engines, what the host does for a step, and servers."""
