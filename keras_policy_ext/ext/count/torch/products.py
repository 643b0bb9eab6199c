"""The matmuls that PyTorch has computed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch.nn import functional

from keras_policy_ext.backends.torch.traced_programs import (
    CONVOLUTIONS,
    FIRST_TWO,
    LAST_TWO,
    OF_UNKNOWN_SIZES,
    TRANSPOSED,
    ProductCall,
)
from keras_policy_ext.ext.count.matmul_sizes import (
    MatmulSizes,
    of_convolution,
    of_einsum,
    of_matmul,
)


def products(
    calls: Iterable[ProductCall],
) -> Iterator[tuple[MatmulSizes | None, bool]]:
    """Yield the matmul of each call and True; None and False if unknown."""
    for call in calls:
        product = _product(call)
        if product is not None:
            yield product, True
        elif call.function in OF_UNKNOWN_SIZES:
            yield None, False


def _product(call: ProductCall) -> MatmulSizes | None:
    function, shapes = call.function, call.shapes
    if function in FIRST_TWO:
        return of_matmul(*shapes[:2])
    if function in LAST_TWO:
        return of_matmul(*shapes[1:3])
    if function is functional.linear:
        return of_matmul(shapes[0], shapes[1][::-1])
    if function is torch.einsum and len(shapes) == 2:
        return of_einsum(str(call.equation), *shapes)
    if function is torch.tensordot:
        first, second = map(math.prod, shapes[:2])
        number = math.isqrt(first * second * math.prod(call.outputs))
        return MatmulSizes(number, (first, second))
    if function in CONVOLUTIONS:
        # Channels are the axis before those of space: a batch may lack.
        channels = call.outputs[1 - len(shapes[1])]
        positions = math.prod(call.outputs) // channels
        return of_convolution(positions, *shapes[:2])
    if function in TRANSPOSED:
        channels = shapes[0][1 - len(shapes[1])]
        positions = math.prod(shapes[0]) // channels
        return of_convolution(positions, *shapes[:2])
    return None
