"""A server that speaks OpenAI's protocol, measured under load."""
