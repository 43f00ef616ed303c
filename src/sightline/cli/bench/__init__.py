"""The commands `bench ...`."""
