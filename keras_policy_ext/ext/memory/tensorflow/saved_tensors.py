"""TensorFlow: the tensors that a tape saves for gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from keras_policy_ext._types import Tensor, override
from keras_policy_ext.backends.traced_programs import scope_name, scope_number
from keras_policy_ext.ext.memory.saved_tensors import (
    Kept,
    Measured,
    MeasuredStep,
    Memory,
    Origin,
    kept_of,
    source_of_variable,
)

_VIEWS = frozenset(
    [
        "ExpandDims",
        "Identity",
        "PreventGradient",
        "Reshape",
        "Squeeze",
        "StopGradient",
    ]
)
"""Operations whose result shares memory with their first operand."""

_OF_SHAPES = frozenset(["Rank", "Shape", "ShapeN", "Size", "ZerosLike"])

_CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))


def kept(step: MeasuredStep) -> Measured:
    """List the forward tensors that gradient operations read, each once."""
    graph, given, gradients, count = _traced(step)
    operations = graph.get_operations()
    forward = {each.name for each in operations[:count]}
    functions = _Functions(graph)
    origins = _Origins(operations[:count], given, functions, _evaluator(graph))
    # In the order of their calls, so that the first that keeps a tensor
    # counts.
    layers = dict.fromkeys(scope_number(x.name) for x in operations[:count])
    places = {layer: place for place, layer in enumerate(layers)}
    found: dict[int, Kept] = {}
    for operation, tensor in _reads(operations, forward, gradients, functions):
        layer = scope_number(operation.name)
        layer = scope_number(tensor.op.name) if layer is None else layer
        origin = origins.of(tensor)
        kept = kept_of(origin, layer)
        if kept is not None:
            both = kept, found.get(id(origin), kept)
            found[id(origin)] = min(both, key=lambda x: places.get(x.layer, 0))
    graph_is = "for XLA, which" if step.for_xla else "that"
    return Measured(
        list(found.values()),
        f"what gradients of TensorFlow read, in a graph {graph_is} is not run",
    )


def _traced(
    step: MeasuredStep,
) -> tuple[Any, dict[str, Origin], list[Tensor], int]:
    """Return (graph, origins of inputs, gradients, forward operations)."""
    found: list[Any] = []

    def run(values: list[Tensor], batch: Any) -> list[Tensor]:
        outputs = step.call(values, batch, _inside)
        graph = tf.compat.v1.get_default_graph()
        count = len(graph.get_operations())  # of the forward pass
        pairs = zip(values, step.trained, strict=True)
        trained = [value for value, is_trained in pairs if is_trained]
        gradients = tf.gradients(outputs, trained)
        found.append(_given(step, values, batch))
        found.append([each for each in gradients if each is not None])
        found.append(count)
        return outputs

    def spec(x: Tensor) -> Any:
        dtype = keras.backend.standardize_dtype(x.dtype)
        return tf.TensorSpec(tuple(x.shape), dtype)

    values = [spec(variable) for variable in step.variables]
    batch = keras.tree.map_structure(spec, step.batch)
    function = tf.function(
        run, autograph=False, jit_compile=step.for_xla or None
    )
    graph = function.get_concrete_function(values, batch).graph
    return graph, found[0], found[1], found[2]


def _inside(number: int) -> Any:
    return tf.name_scope(scope_name(number))


def _given(step: MeasuredStep, values: Any, batch: Any) -> dict[str, Origin]:
    sources = [source_of_variable(is_weight) for is_weight in step.weights]
    tensors = [*values, *keras.tree.flatten(batch)]
    sources += ["batch"] * (len(tensors) - len(sources))
    return {
        tensor.name: Origin(_bytes(tensor), {source}, is_given=True)
        for tensor, source in zip(tensors, sources, strict=True)
    }


class _Origins:
    """For each tensor of a forward pass, the tensor that owns its memory.

    Args:
        operations: The operations of the forward pass.
        given: The origins of the inputs, by tensor name.
        functions: The functions of the graph.
        evaluated: Returns the value of a constant tensor; None if unknown.
    """

    def __init__(
        self,
        operations: Iterable[Any],
        given: dict[str, Origin],
        functions: _Functions,
        evaluated: Callable[[Tensor], int | None],
    ):
        self._known = dict(given)
        self._functions = functions
        self._evaluated = evaluated
        for operation in operations:
            for tensor in operation.outputs:
                if tensor.name not in self._known:
                    self._known[tensor.name] = self._made(operation, tensor)

    def of(self, tensor: Tensor) -> Origin:
        """Return the `Origin` of a tensor, or one of zero bytes if unknown."""
        return self._known.get(tensor.name) or Origin(0, ())

    def _made(self, operation: tf.Operation, tensor: Tensor) -> Origin:
        operands = [self.of(each) for each in operation.inputs]
        if operation.type == "ReadVariableOp":
            return Origin(_bytes(tensor), {"weights"}, is_given=True)
        if operation.type in _VIEWS:
            return operands[0]
        number = tensor.value_index
        if operation.type == "IdentityN":
            return operands[number]
        size = _bytes(tensor)
        if operation.type in ("While", "StatelessWhile"):
            if operands[number].is_given:
                return operands[number]
            size = size or self._bytes_of_list(operation, number)
        wanted = [n == number for n in range(len(operation.outputs))]
        used = self._functions.used(operation, wanted)
        sources = frozenset[str]().union(
            *(
                each.sources
                for each, is_used in zip(operands, used, strict=True)
                if is_used
            )
        )
        return Origin(size, sources)

    def _bytes_of_list(self, loop: Any, number: int) -> int:
        """Return the bytes of a tensor list with one entry per loop step."""
        made = loop.inputs[number].op
        if made.type != "EmptyTensorList":
            return sum(self.of(each).bytes for each in made.inputs)
        sizes = tf.get_static_value(made.inputs[0])
        if sizes is None or min(sizes, default=0) < 0:
            return 0
        itemsize = int(made.get_attr("element_dtype").size)
        steps = self._evaluated(made.inputs[1]) or 0
        if steps < 1:
            steps = self._steps(loop)
        return int(math.prod(sizes.tolist())) * itemsize * steps

    def _steps(self, loop: Any) -> int:
        """Return a loop's number of steps, from the longest list it reads."""
        lengths = [1]
        for tensor in loop.inputs:
            if tensor.op.type == "TensorListReserve":
                lengths.append(self._evaluated(tensor.op.inputs[1]) or 0)
            elif tensor.op.type == "TensorListFromTensor":
                lengths.append(tensor.op.inputs[0].shape[0] or 0)
        return max(lengths)


def _evaluator(graph: Any) -> Callable[[Tensor], int | None]:
    """Return a function from a graph's scalar integer tensor to an int."""

    def evaluated(tensor: Tensor) -> int | None:
        value = tf.get_static_value(tensor)
        if value is None:
            session = tf.compat.v1.Session(graph=graph)
            with contextlib.suppress(tf.errors.OpError), session:
                value = session.run(tensor)
        return None if value is None else int(value)

    return evaluated


def _reads(
    operations: list[Any],
    forward: set[str],
    gradients: list[Tensor],
    functions: _Functions,
) -> list[tuple[Any, Tensor]]:
    """List pairs of a gradient operation and a forward tensor it reads."""
    wanted = {tensor.name for tensor in gradients}
    found = []
    for operation in reversed(operations):
        results = [tensor.name in wanted for tensor in operation.outputs]
        # TensorFlow leaves out what no gradient depends on, too.
        if operation.name in forward or not any(results):
            continue
        used = functions.used(operation, results)
        for tensor, is_used in zip(operation.inputs, used, strict=True):
            if not is_used:
                continue
            wanted.add(tensor.name)
            of_shapes = operation.type in _OF_SHAPES
            if tensor.op.name in forward and not of_shapes:
                found.append((operation, tensor))
    return found


class _Functions:
    """The functions of a graph, and which inputs their results depend on."""

    def __init__(self, graph: Any):
        library = graph.as_graph_def().library
        self._functions = {x.signature.name: x for x in library.function}

    def used(self, operation: tf.Operation, wanted: list[bool]) -> list[bool]:
        """Return, for each operand, whether the wanted results depend on it."""
        every = [True] * len(operation.inputs)
        if operation.type not in _CALLS:
            return every
        function = self._functions.get(operation.get_attr("f").name)
        if function is None:
            return every
        needed = _needed(function, wanted)
        return [each.name in needed for each in function.signature.input_arg]


def _needed(function: Any, wanted: list[bool]) -> set[str]:
    """Return the names of nodes that a function's wanted results depend on."""
    inputs = {node.name: node.input for node in function.node_def}
    pairs = zip(function.signature.output_arg, wanted, strict=True)
    waiting = [function.ret[out.name] for out, is_wanted in pairs if is_wanted]
    needed: set[str] = set()
    while waiting:
        name, _, _ = waiting.pop().partition(":")
        # A control edge keeps no tensor.
        if name.startswith("^") or name in needed:
            continue
        needed.add(name)
        waiting.extend(inputs.get(name, ()))
    return needed


def _bytes(tensor: Tensor) -> int:
    size = tensor.shape.num_elements()
    if size is None or tensor.dtype in (tf.variant, tf.resource, tf.string):
        return 0
    return int(size) * int(tensor.dtype.size)


class TensorFlowMemory(Memory):
    """Read from the graphs of a tape."""

    name = "tensorflow"

    @override
    def kept(self, step: MeasuredStep) -> Measured:
        return kept(step)


MEMORY = TensorFlowMemory()
