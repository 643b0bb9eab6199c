"""The scales of values, moved to the weights of a weighted sum."""

from __future__ import annotations

import keras
from keras import ops

from keras_policy_ext._types import Tensor
from keras_policy_ext.contractions.equations import split
from keras_policy_ext.numerics import scaling


def fold(
    equation: str, weights: Tensor, values: Tensor, limit: float
) -> tuple[Tensor, Tensor]:
    """Return weights and values with the same product, values in range.

    Values are divided by a scale per key, and weights are multiplied by it: `P
    V = (P s) (V / s)`. It is a power of two, so that nothing is rounded, and a
    constant for gradients. No scale is of two keys, so a key whose weight is 0,
    such as a masked one, changes nothing. A key with a value that is infinite
    or NaN has the scale NaN, as the outputs should.

    Args:
        equation: Explicit; the second operand is the values. All its axes but
            those of the columns tell keys apart.
        weights: The first operand, in the dtype of `values`, which has the
            range of float32.
        values: The second operand.
        limit: The largest value of the format of the values.

    Raises:
        ValueError: If an axis of the values is neither in the weights nor in
            the outputs.
    """
    first, second, out = split(equation)
    if set(second) - set(first + out):
        raise ValueError(
            "An axis of the values is in no other term of the equation, so a "
            "key has no single scale. Received: "
            f"{equation!r}. Allowed: axes that the weights or the outputs "
            "have too. Sum the values over the axis first."
        )
    scale = ops.stop_gradient(_scale_of_keys(first, second, values, limit))
    scale = ops.cast(scale, keras.backend.standardize_dtype(values.dtype))
    return ops.multiply(
        weights, _for_weights(first, second, scale)
    ), ops.divide(values, scale)


def _scale_of_keys(
    first: str, second: str, values: Tensor, limit: float
) -> Tensor:
    """Return a float32 power of two per key; columns have size 1."""
    columns = tuple(
        axis for axis, letter in enumerate(second) if letter not in first
    )
    if columns:
        amax = scaling.amax(values, axis=columns, keepdims=True)
    else:
        amax = ops.cast(ops.abs(values), "float32")
    scale = scaling.scale_for_limit(amax, limit, power_of_two=True)
    return scale * (amax * 0.0 + 1.0)


def _for_weights(first: str, second: str, scale: Tensor) -> Tensor:
    """Transpose the scales of keys, so that they broadcast to weights."""
    keys = [letter for letter in first if letter in second]
    columns = [letter for letter in second if letter not in keys]
    order = [second.index(letter) for letter in keys + columns]
    scale = ops.transpose(scale, order)
    # By axes and not by sizes, of which a graph may not know some.
    for _ in columns:
        scale = ops.squeeze(scale, -1)
    for axis, letter in enumerate(first):
        if letter not in keys:
            scale = ops.expand_dims(scale, axis)
    return scale
