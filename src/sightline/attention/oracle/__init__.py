"""The oracle that every backend is compared with."""
