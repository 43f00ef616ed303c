"""Requests to results: the step loop, what is launched, and the faces that threads and texts use."""
