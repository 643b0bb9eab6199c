"""Convert models and configs of tf_keras (Keras 2) to Keras 3."""
