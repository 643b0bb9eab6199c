"""The matmuls in programs of JAX."""
