"""Count the matmuls in traced calls."""

from __future__ import annotations

import collections
import importlib
import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras

from keras_policy_ext import contractions, seams
from keras_policy_ext._keras import walking
from keras_policy_ext.conversion.traced_calls import Call, Tracer
from keras_policy_ext.ext.count import matmul_sizes
from keras_policy_ext.ext.count.matmul_sizes import (
    MatmulSizes,
    Shape,
    StockProduct,
)
from keras_policy_ext.layers import by_operation


class Counted(NamedTuple):
    """A matmul found in a call, and the layer that computes it.

    Attributes:
        layer: The layer that computes it.
        product: The sizes of the matmul.
        has_float8_form: Whether it is in float8 if the layer is.
        entries: Entries of the kernel, where that is known: a kernel of each
            token may be gathered from it.
    """

    layer: keras.Layer
    product: MatmulSizes
    has_float8_form: bool
    entries: int | None = None


class Uncounted(NamedTuple):
    """A layer that may have more matmuls, or repeat them more often."""

    layer: keras.Layer


class CountingTracer(Tracer):
    """Counts the matmuls in the calls that it traces."""

    def __init__(self) -> None:
        super().__init__()
        # By the `id` of a layer, and the sizes of a product in its program.
        self._entries: dict[tuple[int, tuple[int, ...]], int] = {}
        name = f"{__package__}.{keras.backend.backend()}.products"
        self._products = importlib.import_module(name).products

    def counting(self) -> AbstractContextManager[None]:
        """Return a block that notes products with kernels in programs."""
        return by_operation.counting(self._note_kernel)

    def _note_kernel(
        self, equation: str, inputs: Any, read: Any, kernel: keras.Variable
    ) -> None:
        """Remember that the call being traced computes a kernel's product."""
        product = matmul_sizes.of_einsum(equation, inputs, read)
        key = id(self.traced_layer), _sizes(product)
        self._entries[key] = math.prod(kernel.shape)

    def count_stock(self, layer: keras.Layer, shape: Shape) -> list[Any]:
        """Count the matmuls of a stock layer by the formula of its class."""
        return _counted(layer, matmul_sizes.of_call(layer, shape))

    def count_cell(self, cell: Any, batch: int, inputs: Shape) -> list[Any]:
        """Count the matmuls of a cell by the formula of its class."""
        return _counted(cell, matmul_sizes.of_cell(cell, batch, inputs))

    def count_contraction(
        self, call: seams.ContractionCall, outputs: Shape
    ) -> list[Any]:
        """Count the matmul of a float8 contraction."""
        if isinstance(call.contraction, contractions.Einsum):
            equation = call.contraction.equation
            product = matmul_sizes.of_einsum(equation, *call.shapes)
        else:
            shapes = *call.shapes, outputs
            product = matmul_sizes.convolution(call.contraction, *shapes)
        entries = math.prod(call.operands[1].shape)
        return [Counted(call.layer, product, True, entries)]

    def count_program(self, layer: keras.Layer, program: Any) -> list[Any]:
        """Count the matmuls in a program."""
        counted: list[Any] = []
        is_complete = True
        for product, is_known in self._products(program):
            is_complete = is_complete and is_known
            if product is not None:
                key = id(self.traced_layer), _sizes(product)
                entries = self._entries.get(key)
                counted.append(Counted(layer, product, False, entries))
        return counted if is_complete else [*counted, Uncounted(layer)]

    def count_untraced(self, layer: keras.Layer) -> list[Any]:
        """Note that a layer, and those in it, are not counted."""
        return list(map(Uncounted, walking.layers_within(layer)))

    def count_steps(self, counted: Sequence[Any], steps: int) -> list[Any]:
        """Count the matmuls of all steps of a loop."""
        return [
            each._replace(product=each.product.times(steps))
            if isinstance(each, Counted)
            else each
            for each in counted
        ]


def of_call(call: Call) -> list[Counted]:
    """Return the matmuls of a call."""
    return [each for each in call.counted if isinstance(each, Counted)]


def paired(
    small: Call, large: Call
) -> tuple[list[tuple[Counted, Counted]], list[keras.Layer]]:
    """Return the matmuls of calls on two batch sizes in pairs.

    Returns:
        The pairs, and the layers without pairs: they have more matmuls for
        more samples, as in a loop over the samples.
    """
    calls = of_call(small), of_call(large)
    one, other = (collections.Counter(id(x.layer) for x in c) for c in calls)
    loops = {key for key in one | other if one[key] != other[key]}
    kept = ([x for x in each if id(x.layer) not in loops] for each in calls)
    left = {id(x.layer): x.layer for each in calls for x in each}
    return list(zip(*kept, strict=True)), [left[key] for key in loops]


def _sizes(product: MatmulSizes) -> tuple[int, ...]:
    return product.multiplications, *sorted(product.sizes)


def _counted(
    layer: keras.Layer, products: Iterable[StockProduct]
) -> list[Counted]:
    return [Counted(layer, *each) for each in products]
