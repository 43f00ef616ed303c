"""Attention with torch alone."""
