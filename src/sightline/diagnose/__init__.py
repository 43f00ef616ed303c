"""What runs here, and why: the environment, capabilities, and packages that are missing."""
