"""Optimizers whose moments take one byte a number."""
