"""TensorFlow: find the matmuls of a graph, and the tensors saved by a tape."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.flows import Flow
from keras_policy_ext.backends.tracing import (
    Kept,
    Measured,
    MeasuredStep,
    Origin,
    Product,
    Traced,
    convolution,
    einsum,
    kept_of,
    layer_of,
    matmul,
    scope_name,
    source_of_variable,
)

# There is no public way to the graph of a function (TF 2.21). Where this one is
# gone, what functions multiply is not counted.
try:
    from tensorflow.python.framework import function_def_to_graph
except ImportError:
    function_def_to_graph = None

_MATMULS = ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
_LOOPS = ("While", "StatelessWhile")


_CHOICES = frozenset(
    (
        *("TopK", "TopKV2", "ApproxTopK", "ArgMax", "ArgMin", "Multinomial"),
        *("StatelessMultinomial", "XlaSort", "XlaKeyValueSort"),
    )
)
"""Operations that look for the largest or smallest entries."""


def trace(
    function: Callable[..., Any], inputs: list[Any], flow: Flow | None = None
) -> Traced:
    """Trace a function with TensorFlow; see `Backend.trace`."""
    # What Keras computes shapes in; `tf.function` takes longer.
    graph = tf.__internal__.FuncGraph("products")
    with graph.as_default():
        tensors = [tf.compat.v1.placeholder(x.dtype, x.shape) for x in inputs]
        returned = function(*tensors)
    outputs = keras.tree.map_structure(_described, returned)
    types: set[str] = set()
    found = list(_products(graph, types))
    products = [product for product, _ in found]
    is_complete = all(known for _, known in found)
    if flow is not None:
        results = filter(tf.is_tensor, keras.tree.flatten(returned))
        flow.start(map(_key, tensors))
        _follow(graph, flow)
        flow.finish(map(_key, results))
    return Traced(
        outputs, products, is_complete, not _CHOICES.isdisjoint(types)
    )


def mark_call(
    flow: Flow, number: int, operands: list[Any], results: list[Any]
) -> list[Any]:
    """Mark a call in a graph; see `Backend.mark_call`."""
    marked = tf.raw_ops.IdentityN(
        input=[*operands, *results], name=scope_name(number)
    )
    return list(marked[len(operands) :])


def _key(tensor: Tensor) -> tuple[int, str]:
    return id(tensor.graph), tensor.name


def _follow(graph: Any, flow: Flow) -> None:
    """Follow the tensors of a graph, one operation after the other."""
    for step in graph.get_operations():
        operands = list(map(_key, step.inputs))
        call = layer_of(step.name) if step.type == "IdentityN" else None
        number = flow.results_of(call)
        if call is not None and number is not None:
            given = len(operands) - number
            results = map(_key, step.outputs[given:])
            flow.called(call, operands[:given], results)
            continue
        if step.type in _OF_SHAPES or step.type == "Placeholder":
            continue
        kind: Any = "choice" if step.type in _CHOICES else "other"
        if step.type == "Einsum" or _product(step) is not None:
            kind = "product"
        inner = list(_inner(step, graph))
        if not inner:
            made = [(_key(x), x.dtype.name) for x in step.outputs]
            flow.computed(kind, operands, made)
        for each in inner:
            given_to = operands[len(operands) - len(each.inputs) :]
            for old, new in zip(given_to, each.inputs, strict=False):
                flow.same(old, _key(new))
            _follow(each, flow)
            if len(each.outputs) == len(step.outputs):
                pairs = zip(each.outputs, step.outputs, strict=True)
                for inside, outside in pairs:
                    flow.same(_key(inside), _key(outside))


def _described(x: Tensor) -> Any:
    if not tf.is_tensor(x):
        return x
    return keras.KerasTensor(x.shape, keras.backend.standardize_dtype(x.dtype))


def _products(graph: Any, types: set[str]) -> Iterator[tuple[Product, bool]]:
    """Yield each matmul of a graph, and whether its count is known.

    The types of its operations are added to `types`.
    """
    for step in graph.get_operations():
        types.add(step.type)
        product = _product(step)
        if product is not None:
            yield product, True
            continue
        inner = [list(_products(each, types)) for each in _inner(step, graph)]
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


def _shape(tensor: Tensor) -> list[int]:
    shape = tensor.shape
    if shape.rank is None:  # A variable in a graph that was made anew.
        shapes = tensor.op.get_attr("_output_shapes")
        shape = tf.TensorShape(shapes[tensor.value_index])
    return list(shape.as_list())


def _inner(step: Any, graph: Any) -> Iterator[Any]:
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
        number = len(function.signature.input_arg)
        inputs = list(step.inputs)[len(step.inputs) - number :]
        yield function_def_to_graph.function_def_to_graph(
            function,
            input_shapes=[tensor.shape for tensor in inputs],
            include_library_functions=True,
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
"""Operations that read only the shape of their operand, not its data."""

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
    layers = dict.fromkeys(layer_of(x.name) for x in operations[:count])
    places = {layer: place for place, layer in enumerate(layers)}
    found: dict[int, Kept] = {}
    for operation, tensor in _reads(operations, forward, gradients, functions):
        layer = layer_of(operation.name)
        layer = layer_of(tensor.op.name) if layer is None else layer
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
    """Trace the forward and the backward pass of a step in one graph.

    Returns:
        The graph; the origins of its inputs, by tensor name; the gradients;
        and the number of operations of the forward pass.
    """
    found: list[Any] = []

    def run(values: list[Tensor], batch: Any) -> list[Tensor]:
        outputs = step.call(values, batch, _inside)
        graph = tf.compat.v1.get_default_graph()
        count = len(graph.get_operations())
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
    """List pairs of a gradient operation and a forward tensor it reads.

    Operations that no gradient depends on are left out, as in TensorFlow.
    """
    wanted = {tensor.name for tensor in gradients}
    found = []
    for operation in reversed(operations):
        results = [tensor.name in wanted for tensor in operation.outputs]
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
