"""Arithmetic in NumPy, slow and simple, by which tests judge kernels."""
