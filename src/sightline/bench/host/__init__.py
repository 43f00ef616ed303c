"""The host's work per step, measured without a model."""
