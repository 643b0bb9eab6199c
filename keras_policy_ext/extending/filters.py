"""Filters of `convert` that know the sizes of all kernels."""

from keras_policy_ext.conversion.candidates import (
    Candidate,
    SizeFilter,
    not_multiples,
)

__all__ = ["Candidate", "SizeFilter", "not_multiples"]
