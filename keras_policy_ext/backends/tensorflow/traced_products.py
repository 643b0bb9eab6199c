"""TensorFlow: the products of a function, read off its graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_policy_ext.backends.traced_products import (
    Product,
    Traced,
    convolution,
    einsum,
    matmul,
)

# There is no public way to the graph of a function (TF 2.21). Where this one is
# gone, what functions multiply is not counted.
try:
    from tensorflow.python.framework import function_def_to_graph
except ImportError:
    function_def_to_graph = None

_MATMULS = ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
_LOOPS = ("While", "StatelessWhile")


def trace(function: Callable[..., Any], inputs: list[Any]) -> Traced:
    """See `Backend.trace`."""
    # What Keras computes shapes in; `tf.function` takes longer.
    graph = tf.__internal__.FuncGraph("products")
    with graph.as_default():
        tensors = [tf.compat.v1.placeholder(x.dtype, x.shape) for x in inputs]
        returned = function(*tensors)
    outputs = keras.tree.map_structure(_described, returned)
    found = list(_products(graph))
    products = [product for product, _ in found]
    return Traced(outputs, products, all(known for _, known in found))


def _described(x: Any) -> Any:
    if not tf.is_tensor(x):
        return x
    return keras.KerasTensor(x.shape, keras.backend.standardize_dtype(x.dtype))


def _products(graph: Any) -> Iterator[tuple[Product, bool]]:
    """Each product, and whether it is known how often it is computed."""
    for step in graph.get_operations():
        product = _product(step)
        if product is not None:
            yield product, True
            continue
        inner = [list(_products(each)) for each in _inner(step, graph)]
        if step.type in ("If", "StatelessIf", "Case", "StatelessCase"):
            inner = [max(inner, key=_total)]
        for found in inner:
            for product, known in found:
                yield product, known and step.type not in _LOOPS


def _total(found: list[tuple[Product, bool]]) -> int:
    return sum(product.multiplications for product, _ in found)


def _product(step: Any) -> Product | None:
    if step.type in _MATMULS:
        first, second = _shapes(step)
        flags = ("transpose_a", "transpose_b")
        if step.type != "MatMul":
            flags = ("adj_x", "adj_y")
        left, right = (step.get_attr(flag) for flag in flags)
        first = [*first[:-2], *reversed(first[-2:])] if left else first
        second = [*second[:-2], *reversed(second[-2:])] if right else second
        return matmul(first, second)
    if step.type == "Einsum":
        shapes = _shapes(step)
        if len(shapes) == 2:
            return einsum(step.get_attr("equation").decode(), *shapes)
    if step.type in ("Conv2D", "Conv3D", "DepthwiseConv2dNative"):
        inputs, kernel = _shapes(step)
        (outputs,) = map(_shape, step.outputs)
        first = step.get_attr("data_format").startswith(b"NC")
        channels = outputs[1 if first else -1]
        return convolution(math.prod(outputs) // channels, inputs, kernel)
    if step.type in ("Conv2DBackpropInput", "Conv3DBackpropInputV2"):
        # A transposed one: each input is multiplied with all of the kernel.
        _, kernel, inputs = _shapes(step)
        return convolution(math.prod(inputs) // kernel[-1], inputs, kernel)
    return None


def _shapes(step: Any) -> list[list[int]]:
    return [_shape(tensor) for tensor in step.inputs]


def _shape(tensor: Any) -> list[int]:
    shape = tensor.shape
    if shape.rank is None:  # A variable in a graph that was made anew.
        shapes = tensor.op.get_attr("_output_shapes")
        shape = tf.TensorShape(shapes[tensor.value_index])
    return list(shape.as_list())


def _inner(step: Any, graph: Any) -> Iterator[Any]:
    """The graphs in a step, such as those of a loop or a function."""
    names = [
        name
        for attribute in step.node_def.attr.values()
        for name in (
            attribute.func.name,
            *(function.name for function in attribute.list.func),
        )
        if name
    ]
    if not names or function_def_to_graph is None:
        return
    library = graph.as_graph_def(add_shapes=True).library.function
    functions = {each.signature.name: each for each in library}
    for name in names:
        function = functions.get(name)
        if function is None:
            continue
        number = len(function.signature.input_arg)
        inputs = list(step.inputs)[len(step.inputs) - number :]
        yield function_def_to_graph.function_def_to_graph(
            function,
            input_shapes=[tensor.shape for tensor in inputs],
            include_library_functions=True,
        )
