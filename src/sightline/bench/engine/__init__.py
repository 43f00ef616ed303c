"""Benchmarks of whole engines, compared with other engines."""
