"""The matmuls in graphs of TensorFlow."""
