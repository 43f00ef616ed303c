"""Whole files of texts through an engine."""
