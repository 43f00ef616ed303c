"""Kernels in Triton: tensors in, tensors out, nothing allocated. Knows nothing of batches, plans or models.

Every kernel also runs in Triton's interpreter on CPU tensors (`TRITON_INTERPRET=1` before triton is imported).
"""
