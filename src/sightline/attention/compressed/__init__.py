"""Compressed attention: layers whose entries each stand for several tokens, and indexers over such entries."""
