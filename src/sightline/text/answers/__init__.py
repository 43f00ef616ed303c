"""Reasoning and calls of tools in the text of models: how each family writes them, and how they are read."""
