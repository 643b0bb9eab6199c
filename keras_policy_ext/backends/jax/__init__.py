"""The backend for JAX: its arithmetic, gradients and float8 matmuls."""
