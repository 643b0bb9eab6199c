"""The memory of a step on PyTorch."""
