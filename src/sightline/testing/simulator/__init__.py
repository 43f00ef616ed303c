"""A seeded simulation of an engine under traffic: everything is real but the model, which tells what it read."""
