"""The oracle: what every backend is compared with."""
