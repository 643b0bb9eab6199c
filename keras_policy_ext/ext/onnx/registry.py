"""Register the functions that write layers and operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from keras_policy_ext.ext.onnx.graph import OnnxGraph, Value
from keras_policy_ext.ext.onnx.kernel_nodes import Kernels

LAYERS: dict[type, Callable[..., Value]] = {}
"""Writers by `keras.layers` class; arguments: context, layer, inputs."""

OPERATIONS: dict[str, Callable[..., Value]] = {}
"""Writers by class name; arguments: context, operation, its arguments."""


@dataclasses.dataclass(frozen=True)
class Context:
    """The graph, kernels and callback that are passed to each layer's writer.

    Attributes:
        graph: The graph that the nodes are added to.
        kernels: The kernels of layers, as they are stored.
        call: Writes another layer or operation: `call(layer, *inputs)`.
    """

    graph: OnnxGraph
    kernels: Kernels
    call: Callable[..., Value]

    def bias(self, layer: keras.Layer) -> list[Value]:
        """Return the bias of a layer as a list of at most one `Value`."""
        if layer.bias is None:
            return []
        bias = self.kernels.weight(layer.bias)
        return [self.graph.constant(bias, "bias")]


def layer(*names: str) -> Callable[[Any], Any]:
    """Register the decorated function as the writer of these Keras layers."""

    def register(function: Callable[..., Value]) -> Callable[..., Value]:
        for name in names:
            if hasattr(keras.layers, name):  # This Keras may lack some.
                LAYERS[getattr(keras.layers, name)] = function
        return function

    return register


def operation(*names: str) -> Callable[[Any], Any]:
    """Register the decorated function as the writer of these operations."""

    def register(function: Callable[..., Value]) -> Callable[..., Value]:
        OPERATIONS.update(dict.fromkeys(names, function))
        return function

    return register
