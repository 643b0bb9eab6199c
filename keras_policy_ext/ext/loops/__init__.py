"""Training loops with optimizers other than Keras's, and `fully_shard`."""
