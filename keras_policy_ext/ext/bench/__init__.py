"""Measures here whether training steps are faster in float8."""
