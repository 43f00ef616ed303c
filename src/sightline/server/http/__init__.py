"""HTTP: the pipeline that every request passes, its limits, and access control."""
