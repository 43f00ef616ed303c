"""Helpers that backends compose."""
