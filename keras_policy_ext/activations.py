"""Activation functions that only models of earlier Keras versions use."""

from typing import Any

import keras
from keras import ops

__all__ = ["tf_keras_hard_sigmoid"]


@keras.saving.register_keras_serializable(package="keras_policy_ext")
def tf_keras_hard_sigmoid(x: Any) -> Any:
    """Compute `"hard_sigmoid"` of Keras 1 and 2: 0.2 · x + 0.5, in [0, 1].

    In Keras 3 the name means x / 6 + 0.5 (tf_keras 2.21, keras 3.15).

    Args:
        x: Tensor of any shape and floating dtype.

    Returns:
        A tensor of the same shape and dtype.
    """
    return ops.clip(0.2 * x + 0.5, 0.0, 1.0)
