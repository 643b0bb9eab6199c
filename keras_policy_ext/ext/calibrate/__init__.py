"""Set the scales of a float8 model from a few batches, without training."""
