"""The commands that prove backends and engines."""
