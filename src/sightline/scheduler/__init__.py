"""Requests and pages in, a `Schedule` out. Sees `core` and `cache` only."""
