"""Assembles batches, runs forwards and samples tokens; and the composition root, which builds all of it."""
