"""Take over layers in Keras's own float8, in models and in files."""
