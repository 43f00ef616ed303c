"""OpenAI's Responses API: bodies, answers and the events of a stream."""
