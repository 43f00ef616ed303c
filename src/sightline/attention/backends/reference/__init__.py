"""The oracle as backends."""
