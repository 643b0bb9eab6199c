"""The sizes of matmuls from shapes, also those of Keras's own layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras

from keras_policy_ext._keras.walking import own_weights
from keras_policy_ext.conversion.work import keras_class
from keras_policy_ext.ext.count.traced_calls import einsum_of, stock_multiplies

Shape = Sequence[int]


class MatmulSizes(NamedTuple):
    """The size of a matmul or convolution.

    Attributes:
        multiplications: The number of multiplications, each with its addition.
        sizes: The number of elements of each operand.
    """

    multiplications: int
    sizes: tuple[int, int]

    def times(self, repeats: int) -> MatmulSizes:
        """Return this matmul's size when it runs `repeats` times."""
        return self._replace(multiplications=repeats * self.multiplications)


Products = list[tuple[MatmulSizes, bool]]
"""The matmuls of a program, each with True if the number of runs is known."""


def of_einsum(equation: str, *shapes: Sequence[int]) -> MatmulSizes:
    """Return the size of the matmul of an einsum of two operands."""
    sizes: dict[str, int] = {}
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    for term, shape in zip(terms, shapes, strict=True):
        before, dots, after = term.partition("...")
        number = len(shape) - len(before + after)
        # Axes that stand for "..." are counted from the last one on.
        middle = [f"{n}" for n in reversed(range(number))] if dots else []
        for axis, size in zip([*before, *middle, *after], shape, strict=True):
            sizes[axis] = max(size, sizes.get(axis, 1))
    first, second = map(math.prod, shapes)
    return MatmulSizes(math.prod(sizes.values()), (first, second))


def of_matmul(first: Sequence[int], second: Sequence[int]) -> MatmulSizes:
    """Return the size of `ops.matmul` of tensors with these shapes."""
    left = "..." + "rk"[-len(first) :]
    right = "...kc" if len(second) > 1 else "...k"
    return of_einsum(f"{left},{right}", first, second)


def of_convolution(
    positions: int, inputs: Sequence[int], kernel: Shape
) -> MatmulSizes:
    """Return the size of a convolution of tensors with these shapes.

    Args:
        positions: How often each kernel element is used: the number of output
            positions of all samples.
        inputs: The shape of the inputs.
        kernel: The shape of the kernel.
    """
    entries = math.prod(kernel)
    return MatmulSizes(positions * entries, (math.prod(inputs), entries))


def largest(branches: list[Products]) -> Products:
    """Return the matmuls of the branch with the most multiplications."""
    return max(
        branches,
        key=lambda found: sum(each.multiplications for each, _ in found),
        default=[],
    )


class StockProduct(NamedTuple):
    """A matmul or convolution of a stock layer, with its sizes.

    Attributes:
        product: The sizes of the matmul.
        has_float8_form: Whether it is in float8 if the layer is.
    """

    product: MatmulSizes
    has_float8_form: bool = True


def of_call(layer: keras.Layer, shape: Shape) -> list[StockProduct]:
    """Return the matmuls when a stock layer is called on one tensor."""
    if not stock_multiplies(layer):  # or not as its class of Keras does
        return []
    name = keras_class(layer).__name__
    if name == "Dense":
        return [StockProduct(of_matmul(shape, (shape[-1], layer.units)))]
    if name == "EinsumDense":
        equation, kernel = einsum_of(layer, shape)
        return [StockProduct(of_einsum(equation, shape, kernel))]
    return list(_of_convolution(layer, name, shape))


def of_cell(cell: Any, shape: Shape) -> list[StockProduct]:
    """Return the matmuls of one step of a recurrent cell of Keras."""
    positions, *_ = shape
    if keras_class(cell).__name__ == "ConvLSTMCell":
        outputs, _ = cell.compute_output_shape(shape)
        positions = _positions(cell, outputs)
    kernels = [v for v in own_weights(cell) if v.name.endswith("kernel")]
    # The number of inputs only has to differ from batch to batch.
    return [
        StockProduct(of_convolution(positions, shape[:1], kernel.shape))
        for kernel in kernels
    ]


def convolution(
    contraction: Any, inputs: Shape, kernel: Shape, outputs: Shape
) -> MatmulSizes:
    """Return multiplications and operand sizes of a float8 convolution."""
    counted = inputs if contraction.is_transposed else outputs
    positions = _positions(contraction, counted)
    return of_convolution(positions, inputs, kernel)


def _of_convolution(
    layer: Any, name: str, shape: Shape
) -> Iterator[StockProduct]:
    outputs = layer.compute_output_shape(shape)
    last = layer.data_format == "channels_last"
    channels = shape[-1 if last else 1]
    window = math.prod(layer.kernel_size)
    positions = _positions(
        layer, shape if name.endswith("Transpose") else outputs
    )

    def product(*kernel: int) -> MatmulSizes:
        return of_convolution(positions, shape, kernel)

    if name.startswith(("Depthwise", "Separable")):
        own = channels * layer.depth_multiplier
        yield StockProduct(product(window, own), has_float8_form=False)
        if name.startswith("Separable"):
            yield StockProduct(product(own, layer.filters))
        return
    groups = getattr(layer, "groups", 1)
    yield StockProduct(product(window, channels // groups, layer.filters))


def _positions(layer: Any, shape: Shape) -> int:
    last = layer.data_format == "channels_last"
    return math.prod(shape[:-1] if last else (shape[0], *shape[2:]))
