"""The routes: what clients send, what they get, and what happens in between."""
