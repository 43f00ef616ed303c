"""Triton kernels: tensors in, tensors out, no allocation. Does not know batches, plans or models.

Every kernel also runs in Triton's interpreter on CPU tensors (`TRITON_INTERPRET=1` before triton is imported).
"""
