"""Moments on PyTorch, each in one pass."""
