"""TensorFlow: trace a function, and follow the values in its graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.traced_programs import (
    Flow,
    TracedProgram,
    layer_of,
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


def trace(
    function: Callable[..., Any], inputs: list[Any], flow: Flow | None = None
) -> TracedProgram:
    """Trace a function with TensorFlow; see `Backend.trace`."""
    # Keras computes shapes in such a graph too. `tf.function` takes longer.
    graph = tf.__internal__.FuncGraph("products")
    with graph.as_default():
        tensors = [tf.compat.v1.placeholder(x.dtype, x.shape) for x in inputs]
        returned = function(*tensors)
    outputs = keras.tree.map_structure(_described, returned)
    if flow is not None:
        results = filter(tf.is_tensor, keras.tree.flatten(returned))
        flow.start(map(_key, tensors))
        _follow(graph, flow)
        flow.finish(map(_key, results))
    return TracedProgram(outputs, graph, _chooses(graph))


def _key(tensor: Tensor) -> tuple[int, str]:
    """Return what stands for a tensor in a `Flow`."""
    return id(tensor.graph), tensor.name


def _follow(graph: Any, flow: Flow) -> None:
    """Tell a flow each operation of a graph, in order, and of those inside."""
    for step in graph.get_operations():
        operands = list(map(_key, step.inputs))
        # `mark_call` passes a call's operands, then its results, through one.
        call = layer_of(step.name) if step.type == "IdentityN" else None
        result_count = flow.results_of(call)
        if call is not None and result_count is not None:
            first = len(operands) - result_count
            results = map(_key, step.outputs[first:])
            flow.called(call, operands[:first], results)
            continue
        # A size has no source, and a placeholder has its sources already.
        if step.type in _OF_SHAPES or step.type == "Placeholder":
            continue
        kind: Any = "choice" if step.type in _CHOICES else "other"
        if step.type in _PRODUCTS:
            kind = "product"
        bodies = list(graphs_in(step, graph))
        if not bodies:
            made = [(_key(x), x.dtype.name) for x in step.outputs]
            flow.computed(kind, operands, made)
        for body in bodies:
            # A branch is not given the condition, which is the first operand.
            given = operands[len(operands) - len(body.inputs) :]
            for old, new in zip(given, body.inputs, strict=False):
                flow.same(old, _key(new))
            _follow(body, flow)
            # The condition of a loop returns no results of the loop.
            if len(body.outputs) == len(step.outputs):
                pairs = zip(body.outputs, step.outputs, strict=True)
                for inside, outside in pairs:
                    flow.same(_key(inside), _key(outside))


def _described(x: Tensor) -> Any:
    """Return a `keras.KerasTensor` like a tensor; what is none unchanged."""
    if not tf.is_tensor(x):
        return x
    return keras.KerasTensor(x.shape, keras.backend.standardize_dtype(x.dtype))


def _chooses(graph: Any) -> bool:
    """Return True if a graph, or one in it, chooses among values."""
    return any(
        step.type in _CHOICES or any(map(_chooses, graphs_in(step, graph)))
        for step in graph.get_operations()
    )


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
        # The last operands: see `_follow`.
        count = len(function.signature.input_arg)
        inputs = list(step.inputs)[len(step.inputs) - count :]
        yield function_def_to_graph.function_def_to_graph(
            function,
            input_shapes=[tensor.shape for tensor in inputs],
            include_library_functions=True,
        )


_OF_SHAPES = frozenset(["Rank", "Shape", "ShapeN", "Size", "ZerosLike"])
"""Operations that read only the shape of their operand, not its data."""
