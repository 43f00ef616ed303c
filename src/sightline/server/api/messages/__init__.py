"""Anthropic's Messages API: bodies, answers and the events of a stream."""
