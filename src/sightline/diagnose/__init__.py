"""Reports about this machine: declared and proven capabilities of backends, and missing packages."""
