"""What Keras's own layers multiply with their kernels, by their shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from keras_policy_ext._keras import variable_values, walking
from keras_policy_ext.backends import tracing
from keras_policy_ext.backends.tracing import Product
from keras_policy_ext.contractions import equations
from keras_policy_ext.layers.state import Float8State

Shape = Sequence[int]


class StockProduct(NamedTuple):
    """A product of a stock layer.

    Attributes:
        product: What is multiplied.
        has_float8_form: Whether it is in float8 where the layer is.
        shape: Of the outputs, where `compute_output_spec` does not say it.
    """

    product: Product
    has_float8_form: bool = True
    shape: Shape | None = None


_NUMBERS = ("1D", "2D", "3D")
_CONVOLUTIONS = frozenset(f"Conv{rank}" for rank in _NUMBERS)
_TRANSPOSED = frozenset(f"Conv{rank}Transpose" for rank in _NUMBERS)
_BY_CHANNEL = frozenset(f"DepthwiseConv{rank}" for rank in _NUMBERS)
_SEPARABLE = frozenset(f"SeparableConv{rank}" for rank in _NUMBERS)
_CELLS = frozenset(("SimpleRNNCell", "GRUCell", "LSTMCell"))

# Classes of Keras, without layers in them, whose arithmetic is that of what
# they are given or of what derives from them, or depends on an argument.
OTHERS = frozenset(
    (
        *("Layer", "Model", "Functional", "Sequential", "Wrapper", "Lambda"),
        *("TorchModuleWrapper", "JaxLayer", "FlaxLayer", "TFSMLayer"),
        "ReversibleEmbedding",
    )
)


def keras_class(layer: keras.Layer) -> type[keras.Layer]:
    """The nearest class of Keras itself."""
    return next(
        base
        for base in type(layer).__mro__
        if base.__module__.partition(".")[0] == "keras"
    )


def of_call(layer: Any, shape: Shape) -> list[StockProduct] | None:
    """The products of a call on one tensor, which has this shape.

    None for a layer of another class, or with a `call` of its own. Empty for
    a stock layer that multiplies with no kernel.
    """
    name = keras_class(layer).__name__
    if name in OTHERS or not runs_stock_call(layer):
        return None
    if name == "Dense":
        kernel = shape[-1], layer.units
        return [StockProduct(tracing.matmul(shape, kernel))]
    if name == "EinsumDense":
        kernel = tuple(variable_values.stored_kernel(layer).shape)
        ranks = len(shape), len(kernel)
        equation = equations.explicit(layer.equation, *ranks)
        product = tracing.einsum(equation, shape, kernel)
        tensors = map(keras.KerasTensor, (shape, kernel))
        outputs = keras.ops.einsum(equation, *tensors).shape
        return [StockProduct(product, shape=outputs)]
    if name in _CONVOLUTIONS | _TRANSPOSED | _BY_CHANNEL | _SEPARABLE:
        return list(_of_convolution(layer, name, shape))
    inner = walking.layers_directly_in(layer)
    if any(not isinstance(each, Float8State) for each in inner):
        return None
    return []


def of_cell(cell: Any, batch: int, sizes: Shape) -> list[StockProduct] | None:
    """The products of a recurrent cell in one step; None for another cell.

    Args:
        cell: The cell.
        batch: The number of samples.
        sizes: The other axes of the inputs of a step.
    """
    name = keras_class(cell).__name__
    if not runs_stock_call(cell):
        return None
    if name in _CELLS:
        positions = batch
    elif name == "ConvLSTMCell":
        outputs, _ = cell.compute_output_shape((batch, *sizes))
        positions = _positions(cell, outputs)
    else:
        return None
    kernels = [
        v for v in walking.own_weights(cell) if v.name.endswith("kernel")
    ]
    return [
        StockProduct(tracing.convolution(positions, (batch,), kernel.shape))
        for kernel in kernels
    ]


def convolution(
    contraction: Any, inputs: Shape, kernel: Shape, outputs: Shape
) -> Product:
    """The product of a convolution, transposed or not."""
    counted = inputs if contraction.is_transposed else outputs
    return tracing.convolution(_positions(contraction, counted), inputs, kernel)


def runs_stock_call(layer: keras.Layer) -> bool:
    """True if the `call` of a layer is Keras's, or the float8 form of it."""
    owner = next(base for base in type(layer).__mro__ if "call" in vars(base))
    room = owner.__module__.partition(".")[0]
    return room in ("keras", "keras_policy_ext")


def _of_convolution(layer: Any, name: str, shape: Shape) -> Any:
    outputs = layer.compute_output_shape(shape)
    last = layer.data_format == "channels_last"
    channels = shape[-1 if last else 1]
    window = math.prod(layer.kernel_size)
    positions = _positions(layer, shape if name in _TRANSPOSED else outputs)

    def product(*kernel: int) -> Product:
        return tracing.convolution(positions, shape, kernel)

    if name in _BY_CHANNEL | _SEPARABLE:
        own = channels * layer.depth_multiplier
        yield StockProduct(product(window, own), has_float8_form=False)
        if name in _SEPARABLE:
            yield StockProduct(product(own, layer.filters))
        return
    groups = getattr(layer, "groups", 1)
    yield StockProduct(product(window, channels // groups, layer.filters))


def _positions(layer: Any, shape: Shape) -> int:
    last = layer.data_format == "channels_last"
    return math.prod(shape[:-1] if last else (shape[0], *shape[2:]))
