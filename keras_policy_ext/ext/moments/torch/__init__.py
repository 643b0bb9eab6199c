"""Moments on PyTorch."""
