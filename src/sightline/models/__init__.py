"""Model families: what a checkpoint's config means, and the networks that it describes."""
