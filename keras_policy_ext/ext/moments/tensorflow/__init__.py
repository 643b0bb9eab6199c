"""Moments on TensorFlow."""
