"""What Keras on JAX needs: its arithmetic, gradients and float8 matmuls."""
