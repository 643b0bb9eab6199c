"""The memory of a step on JAX."""
