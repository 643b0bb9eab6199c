"""Run a model on one batch, and take the numbers of its contractions."""
