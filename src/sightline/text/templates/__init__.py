"""Chat templates, compiled and run in a sandbox with limits."""
