"""What Keras on TensorFlow needs: its arithmetic, gradients, float8 matmuls."""
