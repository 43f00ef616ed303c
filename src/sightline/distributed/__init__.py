"""Several processes that compute one model: who they are, and how they exchange tensors. Knows no models or engines."""
