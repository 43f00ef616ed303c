"""The cache between steps: pool specs, tensors, page tables, the free list."""
