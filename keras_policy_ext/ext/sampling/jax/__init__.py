"""Gradients of marked tensors on JAX."""
