"""The matmuls that PyTorch has computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from keras_policy_ext.backends.torch import traced_programs as kinds
from keras_policy_ext.ext.count.matmul_sizes import (
    MatmulSizes,
    of_convolution,
    of_einsum,
    of_matmul,
)


def products(
    program: Any,
) -> Iterator[tuple[MatmulSizes | None, bool]]:
    """Yield each call's matmul and True; None and False if it is unknown.

    Args:
        program: A `RecordedProgram`.
    """
    for call in program.products:
        product = _product(call)
        if product is not None:
            yield product, True
        elif call.kind in (kinds.EINSUM, kinds.OTHER):
            yield None, False


def _product(call: kinds.ProductCall) -> MatmulSizes | None:
    kind, shapes = call.kind, call.shapes
    if kind == kinds.MATMUL:
        return of_matmul(*shapes[:2])
    if kind == kinds.ADDED_MATMUL:
        return of_matmul(*shapes[1:3])
    if kind == kinds.LINEAR:
        return of_matmul(shapes[0], shapes[1][::-1])
    if kind == kinds.EINSUM and len(shapes) == 2:
        return of_einsum(str(call.equation), *shapes)
    if kind == kinds.TENSORDOT:
        first, second = map(math.prod, shapes[:2])
        number = math.isqrt(first * second * math.prod(call.outputs))
        return MatmulSizes(number, (first, second))
    if kind == kinds.CONVOLUTION:
        # Channels are the axis before those of space: a batch may lack.
        channels = call.outputs[1 - len(shapes[1])]
        positions = math.prod(call.outputs) // channels
        return of_convolution(positions, *shapes[:2])
    if kind == kinds.TRANSPOSED:
        channels = shapes[0][1 - len(shapes[1])]
        positions = math.prod(shapes[0]) // channels
        return of_convolution(positions, *shapes[:2])
    return None
