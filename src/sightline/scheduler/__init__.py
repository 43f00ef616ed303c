"""Turns requests and free pages into a `Schedule`. Sees `core` and `cache` only."""
