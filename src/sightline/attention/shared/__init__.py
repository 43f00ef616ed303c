"""Building blocks that backends compose."""
