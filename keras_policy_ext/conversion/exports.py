"""Which files of other programs can compute what float8 layers compute."""

from __future__ import annotations

import keras

from keras_policy_ext.conversion.candidates import path_of
from keras_policy_ext.policies.of_layers import layers_in_float8

FORMATS = {
    "jax": ("tf_saved_model",),
    "tensorflow": ("tf_saved_model",),
    "torch": ("torch",),
}
"""Formats of `Model.export` whose files were run and gave the same numbers.

On TensorFlow, an ONNX file names an operation that ONNX lacks (tf2onnx 1.17),
and a LiteRT file needs operations that its runtime has not (2.3): both round
by the bits of a number.
"""

KNOWN = ("tf_saved_model", "onnx", "openvino", "litert", "torch")
"""Formats of Keras 3.15; of any other Keras says that there is none."""


def check(model: keras.Model, format: str) -> None:
    """Raise if a file of a format would not compute what the model computes.

    Raises:
        NotImplementedError: If the model has layers in float8, and files of
            this format are not known to compute the same numbers.
    """
    allowed = FORMATS.get(keras.backend.backend(), ())
    if format in allowed or format not in KNOWN:
        return
    layers = layers_in_float8(model)
    if not layers:
        return
    formats = " or ".join(map(repr, allowed)) or "none"
    raise NotImplementedError(
        f"A file in the format {format!r} does not compute what layers in "
        f"float8 do; nothing was written. Received: format={format!r} and a "
        f"model with {len(layers)} layers in float8, the first of them "
        f"{path_of(layers[0])!r}. Allowed on {keras.backend.backend()}: "
        f"{formats}; any format for a model without float8. For ONNX with "
        "float8 weights call `keras_policy_ext.export(model, path, "
        "format='onnx')`. For other formats save the model, call "
        "`keras_policy_ext.revert(model)`, or `thaw` where it is frozen, and "
        "export it then, in the source policy. `keras_policy_ext.load_model` "
        "has the model in float8 again."
    )
