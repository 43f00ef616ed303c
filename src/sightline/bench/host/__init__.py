"""What the host does for a step, measured without a model."""
