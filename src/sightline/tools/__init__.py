"""Tools for people: what runs here, and why."""
