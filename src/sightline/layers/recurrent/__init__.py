"""Layers with a state per sequence: projections, gates and norms around the recurrence that the plan computes."""
