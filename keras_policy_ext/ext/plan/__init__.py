"""Estimate how much faster a model's step is in float8 on a device."""
