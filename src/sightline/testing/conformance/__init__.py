"""The conformance kit: cases, checks, and what came of them."""
