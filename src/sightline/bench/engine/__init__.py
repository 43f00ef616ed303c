"""Whole engines, measured side by side with peers."""
