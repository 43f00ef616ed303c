"""Processes that read bodies and write answers, so that the event loop of the front end never computes."""
