"""TensorFlow: trace a function, and read its graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.traced_programs import (
    Kind,
    Step,
    TracedProgram,
    scope_number,
)

# There is no public way to the graph of a function (TF 2.21). Where this one is
# gone, what functions multiply is not counted.
try:
    from tensorflow.python.framework import function_def_to_graph
except ImportError:
    function_def_to_graph = None

MATMULS = ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
CONVOLUTIONS = ("Conv2D", "Conv3D", "DepthwiseConv2dNative")
TRANSPOSED = ("Conv2DBackpropInput", "Conv3DBackpropInputV2")
_PRODUCTS = frozenset((*MATMULS, "Einsum", *CONVOLUTIONS, *TRANSPOSED))
"""Operations that multiply."""

_CHOICES = frozenset(
    (
        *("TopK", "TopKV2", "ApproxTopK", "ArgMax", "ArgMin", "Multinomial"),
        *("StatelessMultinomial", "XlaSort", "XlaKeyValueSort"),
    )
)
"""Operations that look for the largest or smallest entries."""

_LOOPS = ("While", "StatelessWhile")
"""Operations that repeat a graph."""


def trace(function: Callable[..., Any], inputs: list[Any]) -> TracedProgram:
    """Trace a function with TensorFlow; see `Backend.trace`."""
    # Keras computes shapes in such a graph too. `tf.function` takes longer.
    graph = tf.__internal__.FuncGraph("products")
    with graph.as_default():
        tensors = [tf.compat.v1.placeholder(x.dtype, x.shape) for x in inputs]
        returned = function(*tensors)
    outputs = keras.tree.map_structure(_described, returned)
    results = filter(tf.is_tensor, keras.tree.flatten(returned))
    return TracedProgram(outputs, graph, list(map(_key, results)))


def _key(tensor: Tensor) -> tuple[int, str]:
    """Return what stands for a tensor in a `Step`."""
    return id(tensor.graph), tensor.name


def steps(program: Any, scope: int | None = None) -> Iterator[Step]:
    """Yield the operations of a graph; see `Backend.steps`.

    `scope` is that of a graph that an operation of another one runs.
    """
    for operation in program.get_operations():
        # A size has no source, and what a graph is given is known already.
        if operation.type in _OF_SHAPES or operation.type == "Placeholder":
            continue
        inner = scope_number(operation.name)
        inner = scope if inner is None else inner
        operands: list[Hashable] = list(map(_key, operation.inputs))
        results = list(map(_result, operation.outputs))
        made = []  # The outputs of each body.
        for body in graphs_in(operation, program):
            # A branch is not given the condition, which is the first operand.
            given = operands[len(operands) - len(body.inputs) :]
            read = list(map(_result, body.inputs[: len(given)]))
            yield Step("same", given, read, inner)
            yield from steps(body, inner)
            outputs: list[Hashable] = list(map(_key, body.outputs))
            if len(outputs) != len(results):
                continue  # The condition of a loop.
            # What a step has made, the next one reads.
            if operation.type in _LOOPS:
                yield Step("same", outputs, read, inner)
                yield from steps(body, inner)
            made.append(outputs)
        for number, result in enumerate(results if made else ()):
            kind: Kind = "other" if len(made) > 1 else "same"
            yield Step(kind, [each[number] for each in made], [result], inner)
        if not made:
            kind = "choice" if operation.type in _CHOICES else "other"
            kind = "product" if operation.type in _PRODUCTS else kind
            yield Step(kind, operands, results, inner)


def _result(tensor: Tensor) -> tuple[Hashable, str]:
    return _key(tensor), tensor.dtype.name


def _described(x: Tensor) -> Any:
    """Return a `keras.KerasTensor` like a tensor; what is none unchanged."""
    if not tf.is_tensor(x):
        return x
    return keras.KerasTensor(x.shape, keras.backend.standardize_dtype(x.dtype))


def graphs_in(step: Any, graph: Any) -> Iterator[Any]:
    """Yield the graphs inside of an operation, such as the body of a loop."""
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
        # The last operands: see `steps`.
        count = len(function.signature.input_arg)
        inputs = list(step.inputs)[len(step.inputs) - count :]
        yield function_def_to_graph.function_def_to_graph(
            function,
            input_shapes=[tensor.shape for tensor in inputs],
            include_library_functions=True,
        )


_OF_SHAPES = frozenset(["Rank", "Shape", "ShapeN", "Size", "ZerosLike"])
"""Operations that read only the shape of their operand, not its data."""
