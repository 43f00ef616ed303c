"""The engine process, the messages to and from it, and who keeps it running."""
