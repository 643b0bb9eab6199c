"""Layers whose weights are symbolic tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_policy_ext._keras import variable_values

Array = np.ndarray[Any, Any]


class Symbols:
    """Creates symbolic tensors for variables, and evaluates results of them."""

    def __init__(self) -> None:
        self._tensors: dict[int, Any] = {}
        self._variables: dict[int, keras.Variable] = {}

    def stand_in(self, layer: keras.Layer) -> Any:
        """Return a copy of a layer whose weights are symbolic tensors."""
        # Layers and lists of layers in it are replaced too. Kernels and
        # embeddings are those without LoRA adapters.
        return _SymbolicStandIn(layer, self)

    def tensor(self, variable: keras.Variable) -> Any:
        """Return the symbolic tensor of a variable, always the same tensor."""
        if id(variable) not in self._tensors:
            tensor = keras.KerasTensor(variable.shape, variable.dtype)
            self._tensors[id(variable)] = tensor
            self._variables[id(tensor)] = variable
        return self._tensors[id(variable)]

    def variables(self, result: Any) -> list[keras.Variable]:
        """Return the variables from which a symbolic result is computed.

        Raises:
            TypeError: If it is not computed from these variables.
        """
        return [self._variable(tensor) for tensor in sources(result)]

    def evaluate(
        self, result: Any, value_of: Callable[[keras.Variable], Array]
    ) -> Array:
        """Compute a symbolic result, with `value_of(variable)` as inputs."""
        tensors = sources(result)
        values = [value_of(self._variable(tensor)) for tensor in tensors]
        if tensors == [result]:
            return values[0]
        with keras.device("cpu"):
            made = keras.Function(tensors, result)(values)
            return np.asarray(keras.ops.convert_to_numpy(made))

    def _variable(self, tensor: Any) -> keras.Variable:
        if id(tensor) not in self._variables:
            raise TypeError(
                "A result does not depend on the weights of the model alone. "
                f"Received: {tensor!r}. Allowed: a result that keras.ops "
                "computes from the variables of its layers. Report this with "
                f"the version of KerasHub, and of Keras: {keras.__version__}."
            )
        return self._variables[id(tensor)]


def sources(tensor: Any) -> list[Any]:
    """Return the input tensors from which a symbolic tensor is computed."""
    # They are read from `_keras_history` and `_inbound_nodes` (keras 3.0 to
    # 3.15): a public `keras.Function` computes a graph, but needs its inputs.
    history = getattr(tensor, "_keras_history", None)
    operation = getattr(history, "operation", None)
    if history is None or operation is None:
        return [tensor]
    node = operation._inbound_nodes[history.node_index]
    by_id: dict[int, Any] = {}
    for each in node.input_tensors:
        by_id.update({id(source): source for source in sources(each)})
    return list(by_id.values())


class _SymbolicStandIn:
    """A copy of a layer with symbolic weights; see `Symbols.stand_in`."""

    __slots__ = ("__layer", "__symbols")

    def __init__(self, layer: keras.Layer, symbols: Symbols) -> None:
        self.__layer = layer
        self.__symbols = symbols

    def __getattr__(self, name: str) -> Any:
        layer, symbols = self.__layer, self.__symbols
        if name == "get_layer":
            return lambda *args, **kwargs: symbols.stand_in(
                layer.get_layer(*args, **kwargs)
            )
        return _replaced(_attribute(layer, name), symbols)


def _attribute(layer: keras.Layer, name: str) -> Any:
    """Return an attribute of a layer, as a float layer without LoRA has it."""
    if name == "kernel":
        return variable_values.stored_kernel(layer)
    if name == "embeddings":
        return variable_values.stored_embeddings(layer)
    if name == "weights":
        return _float_weights(layer)
    return getattr(layer, name)


def _float_weights(layer: keras.Layer) -> list[keras.Variable]:
    """Return a layer's weights in the order in which a stock layer has them."""
    # With adapters, or a kernel that does not train, another one is first.
    weights = [
        variable
        for name in ("_kernel", "_embeddings", "reverse_embeddings", "bias")
        if isinstance(variable := getattr(layer, name, None), keras.Variable)
    ]
    return weights or list(layer.weights)


def _replaced(value: Any, symbols: Symbols) -> Any:
    if isinstance(value, keras.Variable):
        return symbols.tensor(value)
    if isinstance(value, keras.Layer):
        return symbols.stand_in(value)
    if isinstance(value, (list, tuple)):
        return [_replaced(each, symbols) for each in value]
    return value
