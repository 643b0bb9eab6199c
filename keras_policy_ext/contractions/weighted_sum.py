"""The scales of values, moved to the weights of a weighted sum."""

from __future__ import annotations

import keras
from keras import ops

from keras_policy_ext import formats
from keras_policy_ext._types import Tensor
from keras_policy_ext.contractions.equations import Form, axes_alone
from keras_policy_ext.numerics import scaling


def fold(
    form: Form, weights: Tensor, values: Tensor, format_name: str
) -> tuple[Tensor, Tensor]:
    """Return weights and values with the same product, values in range.

    Values are divided by a scale per key, and weights are multiplied by it:
    `P V = (P s) (V / s)`. It is a power of two, so that nothing is rounded.
    No scale is of two keys, so a key whose weight is 0, such as a masked one,
    changes nothing. A key with a value that is infinite or NaN has the scale
    NaN, as the outputs should.

    Args:
        form: Of the equation; the second operand is the values.
        weights: The first operand, in the dtype of `values`, which has the
            range of float32.
        values: The second operand. All axes but those of the columns tell its
            keys apart.
        format_name: The format of the values.

    Returns:
        Weights and values, in their dtype. The scale is a constant for
        gradients.

    Raises:
        ValueError: If an axis of the values is neither in the weights nor in
            the outputs.
    """
    if axes_alone(form, "kernel"):
        raise ValueError(
            "An axis of the values is in no other term of the equation, so a "
            "key has no single scale. Received: "
            f"'{form.first},{form.second}->{form.out}'. Allowed: axes that "
            "the weights or the outputs have too. Sum the values over the "
            "axis first."
        )
    scale = ops.stop_gradient(_scale_of_keys(form, values, format_name))
    scale = ops.cast(scale, keras.backend.standardize_dtype(values.dtype))
    return ops.multiply(weights, _for_weights(form, scale)), ops.divide(
        values, scale
    )


def _scale_of_keys(form: Form, values: Tensor, format_name: str) -> Tensor:
    """Return a float32 power of two per key; columns have size 1."""
    columns = tuple(form.second.index(letter) for letter in form.columns)
    if columns:
        amax = scaling.amax(values, axis=columns, keepdims=True)
    else:
        amax = ops.cast(ops.abs(values), "float32")
    limit = formats.get(format_name).max
    scale = scaling.scale_for_limit(amax, limit, power_of_two=True)
    return scale * (amax * 0.0 + 1.0)


def _for_weights(form: Form, scale: Tensor) -> Tensor:
    """Transpose and reshape the scales of keys to broadcast to weights."""
    sizes = dict(zip(form.second, ops.shape(scale), strict=True))
    kept = [letter for letter in form.first if letter in form.second]
    columns = [letter for letter in form.second if letter not in kept]
    order = [form.second.index(letter) for letter in kept + columns]
    scale = ops.transpose(scale, order)
    shape = [sizes[c] if c in kept else 1 for c in form.first]
    return ops.reshape(scale, shape)
