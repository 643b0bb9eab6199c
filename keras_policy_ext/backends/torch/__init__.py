"""What Keras on PyTorch needs: its arithmetic, gradients and float8 matmuls."""
