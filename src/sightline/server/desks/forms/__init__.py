"""What a desk does for each route: how its bodies are read, and how its answers are written."""
