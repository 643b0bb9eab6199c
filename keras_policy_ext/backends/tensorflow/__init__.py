"""The backend for TensorFlow: its arithmetic, gradients and float8 matmuls."""
