"""Saturating casts and tensor-scaled quantization."""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_policy_ext import formats

Tensor = Any

CASTABLE = ("float8_e4m3fn", "float8_e5m2")
"""Formats that all three frameworks can store."""


def cast(x: Tensor, dtype: str) -> Tensor:
    """Cast to float8, saturating; the same bits on every backend.

    Finite values beyond the largest of the format, and infinities, become
    that largest value; NaN stays NaN; rounding is to nearest, ties to even;
    subnormals are kept. The value is clipped before it is cast, because
    without that 465 becomes NaN on JAX, TensorFlow and torch up to 2.12, and
    448 on torch 2.13.

    Not differentiable: a framework's own gradient of a cast would itself be
    cast to unscaled float8. The contractions define their gradients.

    Args:
        x: Tensor of any shape and real dtype; read as float32.
        dtype: `"float8_e4m3fn"` or `"float8_e5m2"`.

    Returns:
        Tensor of the shape of `x` and of dtype `dtype`.

    Raises:
        ValueError: If `dtype` is not a float8 format that can be stored.
    """
    limit = _limit(dtype)
    return ops.cast(_clip(ops.cast(x, "float32"), limit), dtype)


def quantize(x: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """Divide by the scale in float32, then `cast`.

    Args:
        x: Tensor of any shape and real dtype; read as float32.
        scale: Dequantizing scale, float32, broadcastable to `x`.
        dtype: `"float8_e4m3fn"` or `"float8_e5m2"`.

    Returns:
        `cast(float32(x) / scale)`, of the shape of `x`.

    Raises:
        ValueError: If `dtype` is not a float8 format that can be stored.
    """
    limit = _limit(dtype)
    x = ops.cast(x, "float32")
    # XLA turns a division by a broadcast scalar into a multiplication by its
    # reciprocal, off by one ulp in a quarter of the cases (JAX 0.10). This
    # divisor is no broadcast to it, and the quotient the same.
    divisor = ops.where(ops.isnan(x), float("nan"), scale)
    return ops.cast(_clip(ops.divide(x, divisor), limit), dtype)


def dequantize(q: Tensor, scale: Tensor, dtype: str = "float32") -> Tensor:
    """Undo `quantize`: `float32(q) * scale`, cast to `dtype`.

    Args:
        q: Float8 tensor of any shape.
        scale: Dequantizing scale, float32, broadcastable to `q`.
        dtype: Dtype of the result.

    Returns:
        Tensor of the shape of `q` and of dtype `dtype`.
    """
    scale = ops.cast(scale, "float32")
    return ops.cast(ops.multiply(ops.cast(q, "float32"), scale), dtype)


def quantize_dequantize(
    x: Tensor, scale: Tensor, dtype: str, out_dtype: str = "float32"
) -> Tensor:
    """What of `x` survives float8: `dequantize(quantize(x))`.

    Args:
        x: Tensor of any shape and real dtype; read as float32.
        scale: Dequantizing scale, float32, broadcastable to `x`.
        dtype: `"float8_e4m3fn"` or `"float8_e5m2"`.
        out_dtype: Dtype of the result.

    Returns:
        Tensor of the shape of `x` and of dtype `out_dtype`.

    Raises:
        ValueError: If `dtype` is not a float8 format that can be stored.
    """
    return dequantize(quantize(x, scale, dtype), scale, out_dtype)


def _limit(dtype: str) -> float:
    name = formats.get(dtype).name
    if name not in CASTABLE or name != dtype:
        raise ValueError(
            f"Cannot cast to {dtype!r}. Allowed: {', '.join(CASTABLE)}. "
            "For other formats use `keras_policy_ext.reference`."
        )
    return formats.get(name).max


def _clip(x: Tensor, limit: float) -> Tensor:
    # Comparison and selection, not `ops.clip`: TensorFlow's minimum and
    # maximum do not promise to pass NaN on.
    x = ops.where(ops.greater(x, limit), limit, x)
    return ops.where(ops.less(x, -limit), -limit, x)
