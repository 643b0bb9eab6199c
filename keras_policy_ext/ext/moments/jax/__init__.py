"""Moments on JAX."""
