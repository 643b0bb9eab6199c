"""Which outputs a transposed convolution keeps on PyTorch, before Keras 3.15.

From 3.15 on they are those of JAX and TensorFlow. Before, they were moved by a
place or two under `padding="same"`, and a model that was trained so has to
have them in float8 too. Expires with Keras 3.14.
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
    """Return True if PyTorch has other outputs than JAX and TensorFlow."""
    on_torch = keras.backend.backend() == "torch"
    return on_torch and hasattr(_utils, _OLD) and not hasattr(_utils, _NEW)


def around_axis(
    kernel: int, stride: int, dilation: int, padding: str, more: int | None
) -> tuple[int, int]:
    """Zeros around all outputs along an axis; below 0: outputs to cut off.

    To be asked where the outputs `are_own`.

    Args:
        kernel: Size of the kernel.
        stride: Of the outputs.
        dilation: Distance of the numbers of the kernel.
        padding: `"valid"` or `"same"`.
        more: `output_padding`; None for what Keras chooses.

    Returns:
        Before and after.
    """
    with warnings.catch_warnings():
        # Where Keras computes the same, it has said that backends differ.
        warnings.simplefilter("ignore")
        of_axis = getattr(_utils, _OLD)
        cut, behind = of_axis(kernel, stride, dilation, padding, more)
    return -cut, min(behind, stride - 1) - cut
