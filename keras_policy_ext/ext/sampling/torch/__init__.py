"""Gradients of marked tensors on PyTorch."""
