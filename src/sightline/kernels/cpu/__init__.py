"""Kernels for CPUs, compiled by Numba when they are first needed."""
