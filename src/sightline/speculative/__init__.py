"""Drafters, which guess the next tokens of a sequence, and what becomes of their guesses."""
