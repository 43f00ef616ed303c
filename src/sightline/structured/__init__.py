"""Grammars that answers are held to: compiled from constraints, then followed with a mask for each next token."""
