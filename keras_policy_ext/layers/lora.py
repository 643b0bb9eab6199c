"""LoRA: low-rank adapters beside a float8 kernel.

The kernel is contracted in float8 and the adapters in the compute dtype: `x·W
+ (alpha / rank)·(x·A)·B`. Stock layers merge them first. Quantized with the
scale of the whole kernel, a small adapter would round to nothing.
"""

from __future__ import annotations

import string
from typing import Any

import keras
from keras import ops

from keras_policy_ext._types import Tensor
from keras_policy_ext.contractions import equations


def einsum_adapter(layer: keras.Layer, equation: str, inputs: Tensor) -> Tensor:
    """Compute what LoRA adds to an einsum, in the compute dtype."""
    a, b = _factors(layer)
    equation = equations.explicit(equation, len(inputs.shape), len(a.shape))
    first, second, out = equations.split(equation)
    last_axis = second[-1]
    rank = next(c for c in string.ascii_letters if c not in equation)
    factor_a, factor_b = second[:-1] + rank, rank + last_axis
    # B has the last axis of the kernel. If both inputs and outputs have it, no
    # order of two products is right; if only the inputs have it, B is first.
    if last_axis in first and last_axis in out:
        merged = ops.matmul(a, b)
        return _scale(layer, ops.einsum(equation, inputs, merged))
    if last_axis in out:
        middle = out.replace(last_axis, rank)
        steps = (factor_a, a), (factor_b, b)
    else:
        middle = first.replace(last_axis, rank)
        steps = (factor_b, b), (factor_a, a)
    (term, factor), (next_term, next_factor) = steps
    x = ops.einsum(f"{first},{term}->{middle}", inputs, factor)
    x = ops.einsum(f"{middle},{next_term}->{out}", x, next_factor)
    return _scale(layer, x)


def conv_adapter(
    layer: keras.Layer, inputs: Tensor, arguments: dict[str, Any]
) -> Tensor:
    """Compute what LoRA adds to the outputs of a convolution.

    It is a convolution with the first factor, then one of size 1 with the
    second. With groups, the product of the factors is convolved instead.
    `arguments` are those of `ops.conv`. All are in the compute dtype.
    """
    a, b = _factors(layer)
    if layer.groups > 1:
        return _scale(layer, ops.conv(inputs, ops.matmul(a, b), **arguments))
    x = ops.conv(inputs, a, **arguments)
    b = ops.reshape(b, (1,) * layer.rank + tuple(b.shape))
    return _scale(layer, ops.conv(x, b, data_format=layer.data_format))


def _factors(layer: keras.Layer) -> tuple[Tensor, Tensor]:
    """Return the adapters A and B of a layer, in the compute dtype."""
    factors = layer.lora_kernel_a, layer.lora_kernel_b
    a, b = map(layer.convert_input, factors)
    return a, b


def _scale(layer: keras.Layer, x: Tensor) -> Tensor:
    """Multiply what LoRA adds by `alpha / rank`."""
    return ops.multiply(x, layer.lora_alpha / layer.lora_rank)
