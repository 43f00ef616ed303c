"""What layers keep between steps: pool specs, tensors, page tables, the free list."""
