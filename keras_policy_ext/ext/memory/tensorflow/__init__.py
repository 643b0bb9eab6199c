"""The memory of a step on TensorFlow."""
