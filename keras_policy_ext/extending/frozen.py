"""Kernels that are stored in float8, and those that could be."""

from keras_policy_ext.conversion.freezing import (
    deciding,
    form_to_freeze,
    freezable,
    frozen_layers,
)
from keras_policy_ext.layers.stored_weights import (
    StoredVariable,
    decoded_once,
    held,
    in_place_of_codes,
    kernels_to_store,
    stored_in,
)

__all__ = [
    "StoredVariable",
    "deciding",
    "decoded_once",
    "form_to_freeze",
    "freezable",
    "frozen_layers",
    "held",
    "in_place_of_codes",
    "kernels_to_store",
    "stored_in",
]
