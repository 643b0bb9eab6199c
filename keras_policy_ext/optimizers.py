"""Keras optimizers whose moments are stored in one byte a number."""

from keras_policy_ext.ext.moments.conversion import (
    dequantize_state,
    quantize_state,
)
from keras_policy_ext.ext.moments.quantized import QuantizedState

__all__ = ["QuantizedState", "dequantize_state", "quantize_state"]
