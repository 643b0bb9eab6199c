"""Traced calls of a model, and the programs that frameworks make of them."""

from keras_policy_ext.backends.tracing import layer_of, scope_name
from keras_policy_ext.conversion.traced import multiplies_in_float8

__all__ = ["layer_of", "multiplies_in_float8", "scope_name"]
