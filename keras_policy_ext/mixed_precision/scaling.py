"""The arithmetic of loss scaling, on tensors: float32 throughout."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import keras
from keras import ops

from keras_policy_ext._types import Tensor


class Growth(NamedTuple):
    """How a dynamic loss scale moves.

    After so many steps with finite gradients it is multiplied, after a skipped
    step divided; it stays between minimum and maximum.
    """

    steps: int
    multiplier: float
    minimum: float
    maximum: float


class ScaleState(NamedTuple):
    """What a loss scaler knows: tensors of shape ().

    Attributes:
        scale: Float32, the loss scale.
        good_steps: Integer, finite steps since the scale last moved.
        skipped_steps: Integer, consecutive steps that were skipped.
    """

    scale: Tensor
    good_steps: Tensor
    skipped_steps: Tensor


def scaled(loss: Tensor, scale: Tensor | float) -> Tensor:
    """`loss * scale`, in float32 or wider: float16 would overflow."""
    loss = ops.convert_to_tensor(loss)
    wide = _wide(loss)
    return ops.multiply(ops.cast(loss, wide), ops.cast(scale, wide))


def unscaled(
    gradients: Iterable[Tensor | None], scale: Tensor, left: Iterable[bool]
) -> list[Tensor | None]:
    """Gradients divided by the scale; exact for scales that are powers of 2.

    Args:
        gradients: Floating tensors; None is passed on.
        scale: Float32 scalar.
        left: For each gradient, whether to leave it as it is.

    Returns:
        Tensors in float32, or float64 where a gradient was that.
    """
    # 1 / 2**127 is subnormal and compilers divide by multiplying with it,
    # where JAX and TensorFlow flush it to 0: a large scale goes in two steps.
    one = ops.ones_like(scale)
    part = ops.where(ops.greater(scale, 2.0**64), one * 2.0**-64, one)
    rest = ops.multiply(scale, part)
    return [
        gradient if gradient is None or keep else _divided(gradient, part, rest)
        for gradient, keep in zip(gradients, left, strict=True)
    ]


def all_finite(gradients: Iterable[Tensor | None]) -> Tensor:
    """Whether every number in every gradient is finite: bool scalar."""
    flags = [
        ops.all(ops.isfinite(gradient))
        for gradient in gradients
        if gradient is not None
    ]
    if not flags:
        return ops.convert_to_tensor(True)
    return functools.reduce(ops.logical_and, flags)


def following(
    state: ScaleState, finite: Tensor, growth: Growth | None
) -> ScaleState:
    """The state after a step; without growth the scale is fixed."""
    skipped = ops.where(finite, 0, ops.add(state.skipped_steps, 1))
    if growth is None:
        return state._replace(skipped_steps=skipped)
    good = ops.where(finite, ops.add(state.good_steps, 1), 0)
    grows = ops.greater_equal(good, growth.steps)
    grown = ops.minimum(state.scale * growth.multiplier, growth.maximum)
    shrunk = ops.maximum(state.scale / growth.multiplier, growth.minimum)
    kept = ops.where(grows, grown, state.scale)
    return ScaleState(
        scale=ops.where(finite, kept, shrunk),
        good_steps=ops.where(grows, 0, good),
        skipped_steps=skipped,
    )


def _divided(gradient: Tensor, part: Tensor, rest: Tensor) -> Tensor:
    wide = _wide(gradient)
    gradient = ops.cast(gradient, wide)
    part, rest = ops.cast(part, wide), ops.cast(rest, wide)
    return ops.divide(ops.multiply(gradient, part), rest)


def _wide(x: Tensor) -> str:
    dtype = keras.backend.standardize_dtype(x.dtype)
    return "float64" if dtype == "float64" else "float32"
