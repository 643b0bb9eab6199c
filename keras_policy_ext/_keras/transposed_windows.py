"""Outputs of a transposed convolution on PyTorch before Keras 3.15.

From 3.15 on they are equal to those of JAX and TensorFlow. Before, they were
shifted by one or two positions under `padding="same"`. A model that was
trained with the shift must have it in float8 too. Expires with Keras 3.14.
"""

from __future__ import annotations

import warnings

import keras

try:
    from keras.src.backend.common import backend_utils as _utils
except ImportError:  # Keras has moved it.
    _utils = None

_OLD = "_convert_conv_transpose_padding_args_from_keras_to_torch"
_NEW = "compute_conv_transpose_output_crops_for_torch"


def are_own() -> bool:
    """Return True if Keras's PyTorch outputs differ from other backends'."""
    on_torch = keras.backend.backend() == "torch"
    return on_torch and hasattr(_utils, _OLD) and not hasattr(_utils, _NEW)


def around_axis(
    kernel: int, stride: int, dilation: int, padding: str, more: int | None
) -> tuple[int, int]:
    """Return how many zeros to add before and after an output axis.

    Negative numbers are outputs to remove. `dilation` is the distance of
    elements of the kernel, `more` Keras's `output_padding` or None. Call it
    only if `are_own()`.
    """
    with warnings.catch_warnings():
        # Keras's own call has already warned that backends differ.
        warnings.simplefilter("ignore")
        of_axis = getattr(_utils, _OLD)
        cut, added = of_axis(kernel, stride, dilation, padding, more)
    # It cuts both ends, and then adds zeros; PyTorch adds fewer than a stride.
    return -cut, min(added, stride - 1) - cut
