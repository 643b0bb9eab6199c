"""Counts the multiplications of each layer of a model, for reports."""
