"""The backend for PyTorch: its arithmetic, gradients and float8 matmuls."""
