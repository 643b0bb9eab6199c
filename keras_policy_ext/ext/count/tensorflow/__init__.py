"""The matmuls in a graph of TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.tensorflow import traced_programs
from keras_policy_ext.ext.count.matmul_sizes import (
    MatmulSizes,
    largest,
    of_convolution,
    of_einsum,
    of_matmul,
)

_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
_LOOPS = ("While", "StatelessWhile")


def products(graph: Any) -> Iterator[tuple[MatmulSizes, bool]]:
    """Yield each matmul of a graph, and whether its count is known."""
    for step in graph.get_operations():
        product = _product(step)
        if product is not None:
            yield product, True
            continue
        inner = [
            list(products(each))
            for each in traced_programs.graphs_in(step, graph)
        ]
        if step.type in _BRANCHES:
            inner = [largest(inner)]
        for found in inner:
            for product, known in found:
                yield product, known and step.type not in _LOOPS


def _product(step: Any) -> MatmulSizes | None:
    if step.type in traced_programs.MATMULS:
        first, second = _shapes(step)
        flags = ("transpose_a", "transpose_b")
        if step.type != "MatMul":
            flags = ("adj_x", "adj_y")
        left, right = (step.get_attr(flag) for flag in flags)
        first = [*first[:-2], *reversed(first[-2:])] if left else first
        second = [*second[:-2], *reversed(second[-2:])] if right else second
        return of_matmul(first, second)
    if step.type == "Einsum":
        shapes = _shapes(step)
        if len(shapes) == 2:
            return of_einsum(step.get_attr("equation").decode(), *shapes)
    if step.type in traced_programs.CONVOLUTIONS:
        inputs, kernel = _shapes(step)
        (outputs,) = map(_shape, step.outputs)
        first = step.get_attr("data_format").startswith(b"NC")
        channels = outputs[1 if first else -1]
        return of_convolution(math.prod(outputs) // channels, inputs, kernel)
    if step.type in traced_programs.TRANSPOSED:
        # A transposed one: each input is multiplied with all of the kernel.
        _, kernel, inputs = _shapes(step)
        return of_convolution(math.prod(inputs) // kernel[-1], inputs, kernel)
    return None


def _shapes(step: Any) -> list[list[int]]:
    return [_shape(tensor) for tensor in step.inputs]


def _shape(tensor: Tensor) -> list[int]:
    shape = tensor.shape
    if shape.rank is None:  # A variable in a graph that was made anew.
        shapes = tensor.op.get_attr("_output_shapes")
        shape = tf.TensorShape(shapes[tensor.value_index])
    return list(shape.as_list())
