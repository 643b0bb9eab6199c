"""Gradients of marked tensors on TensorFlow."""
