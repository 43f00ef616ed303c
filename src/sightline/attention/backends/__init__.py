"""One file a backend; `registry` lists them. Backends do not inherit from each other."""
