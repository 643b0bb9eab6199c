"""Find the matmuls of a model's call by tracing it with shapes only.

The framework traces the call of each layer. The layers that it calls are
replaced by zeros of their output shapes, and traced on their own. Layers that
are alike are traced once. The matmuls of Keras's own layers with their kernels
are computed from the shapes of their inputs.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends, contractions, seams
from keras_policy_ext._keras import calls, variable_values, walking
from keras_policy_ext.backends import traced_programs
from keras_policy_ext.backends.flows import HERE, NONE, Flow, Given, Sources
from keras_policy_ext.backends.traced_programs import MatmulSizes
from keras_policy_ext.contractions import equations
from keras_policy_ext.layers import by_operation
from keras_policy_ext.layers.by_operation import note_call
from keras_policy_ext.layers.state import Float8State
from keras_policy_ext.layers.transaction import undone
from keras_policy_ext.policies.of_layers import float8_policy_of

Shape = Sequence[int]


class StockProduct(NamedTuple):
    """A matmul or convolution of a stock layer, with its sizes.

    Attributes:
        product: The sizes of the matmul.
        has_float8_form: Whether it is in float8 if the layer is.
        shape: Of the outputs, if `compute_output_spec` does not give it.
    """

    product: MatmulSizes
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
    """Return the nearest class in a layer's MRO that Keras defines."""
    return next(
        base
        for base in type(layer).__mro__
        if base.__module__.partition(".")[0] == "keras"
    )


def of_call(layer: keras.Layer, shape: Shape) -> list[StockProduct] | None:
    """Return the matmuls when a stock layer is called on one tensor.

    None for a layer of another class, or with a `call` of its own. Empty for
    a stock layer that multiplies with no kernel.
    """
    name = keras_class(layer).__name__
    if name in OTHERS or not runs_stock_call(layer):
        return None
    if name == "Dense":
        kernel = shape[-1], layer.units
        return [StockProduct(traced_programs.matmul(shape, kernel))]
    if name == "EinsumDense":
        kernel = tuple(variable_values.stored_kernel(layer).shape)
        ranks = len(shape), len(kernel)
        equation = equations.explicit(layer.equation, *ranks)
        product = traced_programs.einsum(equation, shape, kernel)
        outputs = equations.outputs_shape(equation, shape, kernel)
        return [StockProduct(product, shape=outputs)]
    if name in _CONVOLUTIONS | _TRANSPOSED | _BY_CHANNEL | _SEPARABLE:
        return list(_of_convolution(layer, name, shape))
    inner = walking.layers_directly_in(layer)
    if any(not isinstance(each, Float8State) for each in inner):
        return None
    return []


def of_cell(cell: Any, batch: int, sizes: Shape) -> list[StockProduct] | None:
    """Return the matmuls of one step of a recurrent cell; None if unknown.

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
        StockProduct(
            traced_programs.convolution(positions, (batch,), kernel.shape)
        )
        for kernel in kernels
    ]


def convolution(
    contraction: Any, inputs: Shape, kernel: Shape, outputs: Shape
) -> MatmulSizes:
    """Return multiplications and operand sizes of a convolution."""
    counted = inputs if contraction.is_transposed else outputs
    return traced_programs.convolution(
        _positions(contraction, counted), inputs, kernel
    )


def runs_stock_call(layer: keras.Layer) -> bool:
    """Return True if a layer's `call` is Keras's, or the float8 form's."""
    owner = next(base for base in type(layer).__mro__ if "call" in vars(base))
    room = owner.__module__.partition(".")[0]
    return room in ("keras", "keras_policy_ext")


def _of_convolution(layer: keras.Layer, name: str, shape: Shape) -> Any:
    outputs = layer.compute_output_shape(shape)
    last = layer.data_format == "channels_last"
    channels = shape[-1 if last else 1]
    window = math.prod(layer.kernel_size)
    positions = _positions(layer, shape if name in _TRANSPOSED else outputs)

    def product(*kernel: int) -> MatmulSizes:
        return traced_programs.convolution(positions, shape, kernel)

    if name in _BY_CHANNEL | _SEPARABLE:
        own = channels * layer.depth_multiplier
        yield StockProduct(product(window, own), has_float8_form=False)
        if name in _SEPARABLE:
            yield StockProduct(product(own, layer.filters))
        return
    groups = getattr(layer, "groups", 1)
    yield StockProduct(product(window, channels // groups, layer.filters))


def _positions(layer: keras.Layer, shape: Shape) -> int:
    last = layer.data_format == "channels_last"
    return math.prod(shape[:-1] if last else (shape[0], *shape[2:]))


class Counted(NamedTuple):
    """A matmul found in a call, and the layer that computes it.

    Attributes:
        layer: The layer that computes it.
        product: The sizes of the matmul.
        has_float8_form: Whether it is in float8 if the layer is.
        entries: Entries of the kernel, where that is known: a kernel of each
            token may be gathered from it.
    """

    layer: keras.Layer
    product: MatmulSizes
    has_float8_form: bool
    entries: int | None = None


class Call(NamedTuple):
    """The result of tracing one call: outputs, matmuls, unknown layers.

    Attributes:
        outputs: A structure with a `keras.KerasTensor` for each tensor.
        counted: Its matmuls.
        unknown: Layers that may have more matmuls, or repeat them more often.
        chooses: Whether a layer in it looks for the largest or smallest
            entries of a tensor.
        reached: For each tensor of the outputs, its sources: the `id` of each
            layer whose products reach it, and `Given` for arguments. Empty
            unless `follow` has traced it, as is `chosen`.
        chosen: For each choice in it, the sources among whose entries it
            chooses.
    """

    outputs: Any
    counted: list[Counted]
    unknown: list[keras.Layer]
    chooses: bool = False
    reached: Sequence[Sources] = ()
    chosen: frozenset[Sources] = frozenset()


def paired(
    small: Call, large: Call
) -> tuple[list[tuple[Counted, Counted]], list[keras.Layer]]:
    """Return the matmuls of calls on two batch sizes in pairs.

    Returns:
        The pairs, and the layers without pairs: they have more matmuls for
        more samples, as in a loop over the samples.
    """
    calls = small.counted, large.counted
    one, other = (collections.Counter(id(x.layer) for x in c) for c in calls)
    loops = {key for key in one | other if one[key] != other[key]}
    kept = ([x for x in each if id(x.layer) not in loops] for each in calls)
    left = {id(x.layer): x.layer for each in calls for x in each}
    return list(zip(*kept, strict=True)), [left[key] for key in loops]


def trace(
    layer: keras.Layer, arguments: Iterable[tuple[Any, dict[str, Any]]]
) -> list[Call]:
    """Trace calls of a layer with shapes only; nothing is computed or changed.

    Args:
        layer: A layer that is built.
        arguments: For each call the positional and the keyword arguments, with
            a `keras.KerasTensor` of known shape for each tensor.

    Raises:
        Exception: If a call raises it.
    """
    return _trace(_Tracer(), layer, arguments)


def follow(layer: keras.Layer, args: Any, kwargs: dict[str, Any]) -> Call:
    """Trace one call like `trace`; find which layers reach which choice.

    Args:
        layer: A layer that is built.
        args: As for `trace`.
        kwargs: As for `trace`.

    Raises:
        Exception: If the call raises it.
    """
    (call,) = _trace(_Tracer(follows=True), layer, [(args, kwargs)])
    return call


def trace_within(
    layer: keras.Layer,
    args: Any,
    kwargs: dict[str, Any],
    within: tuple[type, ...],
) -> Call:
    """Trace one call like `follow`; calls of some layers are followed inside.

    Operations in it can be marked (`mark`).

    Args:
        layer: A layer that is built.
        args: As for `trace`.
        kwargs: As for `trace`.
        within: Classes of inner layers whose operations count as operations of
            the layer that calls them.

    Raises:
        Exception: If the call raises it.
    """
    tracer = _Tracer(follows=True, within=within)
    token = _MARKING.set(tracer)
    try:
        (call,) = _trace(tracer, layer, [(args, kwargs)])
    finally:
        _MARKING.reset(token)
    return call


def mark(
    operands: Sequence[Any],
    result: Any,
    through: Callable[[Sources], Sources],
) -> Any:
    """Mark an operation in the program of the call that `trace_within` traces.

    Args:
        operands: Its tensors.
        result: Its result.
        through: Maps the sources that reach the operands to those of the
            result.

    Returns:
        The result to go on with.
    """
    tracer = _MARKING.get()
    return result if tracer is None else tracer.mark(operands, result, through)


def _trace(
    tracer: _Tracer,
    layer: keras.Layer,
    arguments: Iterable[tuple[Any, dict[str, Any]]],
) -> list[Call]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(keras.StatelessScope())
        stack.enter_context(keras.SymbolicScope())
        stack.enter_context(calls.instead_of_each_call(tracer.called))
        stack.enter_context(_counting(tracer))
        stack.enter_context(by_operation.counting(tracer.multiplies))
        stack.enter_context(undone(walking.layers_within(layer)))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        return [tracer.trace(layer, *each) for each in arguments]


@dataclasses.dataclass
class _Frame:
    """The matmuls found so far in the layer whose call is being traced.

    `weights` has the entries of the kernel of each product, by its sizes.
    """

    layer: keras.Layer
    entered: bool = False
    counted: list[Counted] = dataclasses.field(default_factory=list)
    unknown: list[keras.Layer] = dataclasses.field(default_factory=list)
    chooses: bool = False
    flow: Flow | None = None
    weights: dict[Any, int] = dataclasses.field(default_factory=dict)

    def add(self, call: Call) -> None:
        """Add what was found in a call of an inner layer."""
        self.counted += call.counted
        self.unknown += call.unknown
        self.chooses = self.chooses or call.chooses


class _Tracer:
    """Traces calls of layers; layers of equal structure are traced once.

    Args:
        follows: Whether to find the sources of outputs and choices.
        within: As for `trace_within`.
    """

    def __init__(
        self, follows: bool = False, within: tuple[type, ...] = ()
    ) -> None:
        self._follows = follows
        self._within = within
        self._known: dict[Any, tuple[keras.Layer, Call]] = {}
        self._structures: dict[int, Any] = {}
        self._frames: list[_Frame] = []
        self._kept: list[Any] = []
        self._of_every_layer = {
            *vars(keras.layers.Layer(name="layer")),
            "_build_shapes_dict",
        }

    def called(
        self, stock: Any, layer: keras.Layer, *args: Any, **kwargs: Any
    ) -> Any:
        """Trace the call of an inner layer, and return zeros as its outputs."""
        frame, given = self._frames[-1], keras.tree.flatten((args, kwargs))
        if layer is frame.layer and not frame.entered:
            frame.entered = True
            return stock(layer, *args, **kwargs)
        is_within = type(layer) in self._within
        if is_within or any(isinstance(x, keras.KerasTensor) for x in given):
            return stock(layer, *args, **kwargs)  # Keras asks for a shape.
        found = self.trace(
            layer, *keras.tree.map_structure(_described, (args, kwargs))
        )
        frame.add(found)
        outputs = keras.tree.map_structure(_zeros, found.outputs)
        return self._marked(found, given, outputs)

    def multiplies(
        self, equation: str, inputs: Any, read: Any, kernel: keras.Variable
    ) -> None:
        """Remember that the call being traced computes a kernel's product."""
        product = traced_programs.einsum(equation, inputs, read)
        weights = self._frames[-1].weights
        weights[_sizes(product)] = math.prod(kernel.shape)

    def multiplied(
        self,
        layer: keras.Layer,
        product: MatmulSizes,
        inputs: Any,
        kernel: keras.Variable,
        outputs: Any,
    ) -> Any:
        """Record a matmul of a float8 layer in the call being traced."""
        entries = math.prod(kernel.shape)
        counted = Counted(layer, product, True, entries)
        found = Call(outputs, [counted], [])
        self._frames[-1].add(found)
        found = found._replace(reached=[frozenset([id(layer)])])
        return self._marked(found, [inputs], outputs)

    def mark(
        self,
        operands: Sequence[Any],
        result: Any,
        through: Callable[[Sources], Sources],
    ) -> Any:
        """Mark an operation in the program of the frame; return its result."""
        flow = self._frames[-1].flow if self._frames else None
        if flow is None:
            return result
        number = flow.new_call(lambda each: [through(NONE.union(*each))], 1)
        given = [ops.convert_to_tensor(x) for x in operands]
        (marked,) = backends.current.mark_call(flow, number, given, [result])
        return marked

    def _marked(self, call: Call, given: list[Any], outputs: Any) -> Any:
        """Mark a call in the program of the frame; return its outputs."""
        flow = self._frames[-1].flow
        if flow is None:
            return outputs
        leaves = keras.tree.flatten(outputs)
        places = [n for n, x in enumerate(leaves) if ops.is_tensor(x)]
        marked = backends.current.mark_call(
            flow,
            flow.new_call(_through(call, flow), len(places)),
            [ops.convert_to_tensor(x) for x in given if _is_array(x)],
            [leaves[place] for place in places],
        )
        for place, tensor in zip(places, marked, strict=True):
            leaves[place] = tensor
        return keras.tree.pack_sequence_as(outputs, leaves)

    def trace(
        self, layer: keras.Layer, args: Any, kwargs: dict[str, Any]
    ) -> Call:
        """Trace a call; for a layer like a traced one, copy the result."""
        self._kept.append((args, kwargs))  # No other object gets an id of it.
        key = self._structure(layer), _hashable(args), _hashable(kwargs)
        if key not in self._known:
            self._known[key] = layer, self._found(layer, args, kwargs)
        other, call = self._known[key]
        note_call(layer, other)
        return call if layer is other else _moved(call, other, layer)

    def _found(
        self, layer: keras.Layer, args: Any, kwargs: dict[str, Any]
    ) -> Call:
        try:
            return self._traced(layer, args, kwargs)
        # The code is the user's, and may raise anything.
        except Exception:
            if not _says_its_outputs(layer):
                raise
        outputs = layer.compute_output_spec(*args, **kwargs)
        within = walking.layers_within(layer)
        return Call(
            outputs, [], within, reached=[NONE] * len(_symbolic(outputs))
        )

    def _traced(
        self, layer: keras.Layer, args: Any, kwargs: dict[str, Any]
    ) -> Call:
        if isinstance(layer, keras.layers.RNN):
            return self._recurrent(layer, args, kwargs)
        if isinstance(layer, keras.layers.TimeDistributed):
            return self._time_distributed(layer, args[0])
        if args and isinstance(args[0], keras.KerasTensor):
            found = of_call(layer, args[0].shape)
            if found is not None:
                outputs = layer.compute_output_spec(*args, **kwargs)
                if found and found[0].shape is not None:
                    outputs = keras.KerasTensor(found[0].shape, outputs.dtype)
                given = map(Given, range(len(_symbolic((args, kwargs)))))
                sources = frozenset([id(layer)] if found else given)
                return Call(
                    outputs,
                    _counted(layer, found),
                    [],
                    reached=[sources] * len(_symbolic(outputs)),
                )
        if len(args) == 1 and runs_stock_call(layer):
            if isinstance(layer, keras.Sequential):
                return self._in_turn(layer, args[0])
            if walking.uses_in_graph(layer):
                return self._by_graph(layer, args[0])
        return self._by_program(layer, args, kwargs)

    def _in_turn(self, model: keras.Sequential, inputs: Any) -> Call:
        frame = self._new_frame(model, inputs)
        for layer in model.layers:
            found = self.trace(layer, (inputs,), {})
            frame.add(found)
            inputs = self._passed(frame, found, inputs)
        return self._finished(frame, inputs)

    def _new_frame(self, layer: keras.Layer, inputs: Any) -> _Frame:
        """Return a frame for a model whose layers are called in turn."""
        if not self._follows:
            return _Frame(layer)
        flow = Flow()
        flow.start(map(id, _symbolic(inputs)))
        return _Frame(layer, flow=flow)

    def _passed(self, frame: _Frame, call: Call, given: Any) -> Any:
        """Return the outputs of a call, to give them to other layers."""
        flow = frame.flow
        if flow is None:
            return call.outputs
        # Calls of layers that are alike have the same outputs.
        outputs = keras.tree.map_structure(_described, call.outputs)
        results = _symbolic(outputs)
        self._kept.append((given, outputs))
        flow.called(
            flow.new_call(_through(call, flow), len(results)),
            map(id, _symbolic(given)),
            map(id, results),
        )
        return outputs

    def _finished(self, frame: _Frame, outputs: Any) -> Call:
        call = Call(outputs, frame.counted, frame.unknown, frame.chooses)
        if frame.flow is None:
            return call
        frame.flow.finish(map(id, _symbolic(outputs)))
        return _with_sources(call, frame.flow, frame.layer)

    def _by_graph(self, model: keras.Model, inputs: Any) -> Call:
        """Trace a Functional model one operation of its graph at a time."""
        frame = self._new_frame(model, inputs)

        def call(operation: keras.Operation, *args: Any, **kwargs: Any) -> Any:
            name = type(operation).__name__
            if isinstance(operation, keras.Layer):
                found = self.trace(operation, args, kwargs)
            elif name in _PRODUCTS or (self._follows and name in _CHOICES):
                found = self._by_program(operation, args, kwargs, model)
            else:
                outputs = operation.compute_output_spec(*args, **kwargs)
                frame.chooses = frame.chooses or name in _CHOICES
                if frame.flow is not None:
                    pairs = [(id(x), x.dtype) for x in _symbolic(outputs)]
                    self._kept.append(((args, kwargs), outputs))
                    tensors = map(id, _symbolic((args, kwargs)))
                    frame.flow.computed("other", tensors, pairs)
                return outputs
            frame.add(found)
            return self._passed(frame, found, (args, kwargs))

        given = keras.tree.flatten(inputs)
        outputs = walking.follow_graph(model, given, call)
        structure = keras.tree.pack_sequence_as(model.output, outputs)
        return self._finished(frame, structure)

    def _by_program(
        self,
        layer: keras.Layer,
        args: Any,
        kwargs: dict[str, Any],
        owner: keras.Layer | None = None,
    ) -> Call:
        """Trace `call` of a layer, or an operation in the graph of `owner`."""
        if owner is None:
            _check_built(layer)
        given = keras.tree.flatten((args, kwargs))
        tensors = [x for x in given if isinstance(x, keras.KerasTensor)]
        flow = Flow() if self._follows else None
        frame = _Frame(layer, flow=flow)

        def function(*values: Any) -> Any:
            waiting = iter(values)
            filled = [
                next(waiting) if isinstance(x, keras.KerasTensor) else x
                for x in given
            ]
            # A function may be called again, where its first trace failed.
            vars(frame).update(vars(_Frame(layer, flow=flow)))
            passed = keras.tree.pack_sequence_as((args, kwargs), filled)
            return layer(*passed[0], **passed[1])

        self._frames.append(frame)
        try:
            found = backends.current.trace(function, tensors, flow)
        finally:
            self._frames.pop()
        here = owner or layer
        plain = [
            Counted(here, each, False, frame.weights.get(_sizes(each)))
            for each in found.products
        ]
        unknown = [] if found.is_complete else [here]
        call = Call(
            found.outputs,
            frame.counted + plain,
            frame.unknown + unknown,
            frame.chooses or found.chooses,
        )
        return call if flow is None else _with_sources(call, flow, here)

    def _recurrent(
        self, layer: keras.Layer, args: Any, kwargs: dict[str, Any]
    ) -> Call:
        """Trace an RNN layer: count its cell's matmuls once per time step."""
        batch, steps, *rest = args[0].shape
        outputs = layer.compute_output_spec(*args, **kwargs)
        cells = getattr(layer.cell, "cells", [layer.cell])
        each = [of_cell(cell, batch, rest) for cell in cells]
        if all(found is not None for found in each):
            counted = itertools.chain(*map(_counted, cells, each))
            of_cells: Sources = frozenset(map(id, cells))
            return Call(
                outputs,
                _times(counted, steps),
                [],
                reached=[of_cells] * len(_symbolic(outputs)),
            )
        states = keras.tree.map_structure(
            _described, layer.get_initial_state(batch)
        )
        step = keras.KerasTensor((batch, *rest), args[0].dtype)
        found = self.trace(layer.cell, (step, states), {})
        # What reaches the states in a step is not followed.
        states_given = frozenset(
            Given(1 + n) for n in range(len(_symbolic(states)))
        )
        sources = NONE.union(*found.reached) - states_given
        return found._replace(
            outputs=outputs,
            counted=_times(found.counted, steps),
            reached=[sources] * len(_symbolic(outputs)),
            chosen=frozenset(each - states_given for each in found.chosen),
        )

    def _time_distributed(self, layer: keras.Layer, inputs: Any) -> Call:
        batch, steps, *rest = inputs.shape
        step = keras.KerasTensor((batch, *rest), inputs.dtype)
        found = self.trace(layer.layer, (step,), {})
        shape = (batch, steps, *found.outputs.shape[1:])
        outputs = keras.KerasTensor(shape, found.outputs.dtype)
        return found._replace(
            outputs=outputs, counted=_times(found.counted, steps)
        )

    def _structure(self, layer: keras.Layer) -> Any:
        """Return a key that is equal for layers with equal matmuls."""
        if id(layer) not in self._structures:
            found = tuple(
                (name, _hashable(value))
                for name, value in vars(layer).items()
                if name not in self._of_every_layer
                and not _OF_ONE_LAYER.search(name)
            )
            inner = tuple(
                self._structure(each)
                for each in walking.layers_directly_in(layer)
                if not isinstance(each, Float8State)
            )
            in_float8 = multiplies_in_float8(layer)
            self._structures[id(layer)] = type(layer), in_float8, found, inner
        return self._structures[id(layer)]


# The tracer of a call whose operations can be marked.
_MARKING: contextvars.ContextVar[_Tracer | None] = contextvars.ContextVar(
    "tracer whose operations are marked", default=None
)

# Operations that may be in the graph of a model, and multiply.
_PRODUCTS = frozenset(
    (
        *("Matmul", "Einsum", "Dot", "Vdot", "Inner", "Tensordot", "Conv"),
        *("DepthwiseConv", "SeparableConv", "ConvTranspose", "Bilinear"),
    )
)

# Operations that look for the largest or smallest entries.
_CHOICES = frozenset(("Argmax", "Argmin", "Argsort", "Sort", "TopK"))

# In names of attributes that no two layers have in common, or of TensorFlow's
# and of this package.
_OF_ONE_LAYER = re.compile("name|path|^_self_|float8|_given_by_keras")

# Objects of these packages, such as initializers, say nothing about shapes.
_OWN = ("keras", "keras_policy_ext")


def _is_array(value: Any) -> bool:
    arrays = (keras.Variable, keras.KerasTensor, np.ndarray)
    return isinstance(value, arrays) or ops.is_tensor(value)


def _hashable(value: Any) -> Any:
    """Return a hashable key of an argument; arrays become shape and dtype."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((str(k), _hashable(v)) for k, v in value.items())
    if isinstance(value, keras.Layer):
        return type(value)
    if _is_array(value):
        return tuple(value.shape), str(value.dtype)
    if type(value).__module__.partition(".")[0] in _OWN:
        return type(value)
    return id(value)


def _moved(call: Call, old: keras.Layer, new: keras.Layer) -> Call:
    """Copy a traced call of layer `old` as a call of the equal layer `new`."""
    within = zip(
        walking.layers_within(old), walking.layers_within(new), strict=True
    )
    place = {id(before): after for before, after in within}
    counted = [
        each._replace(layer=place.get(id(each.layer), each.layer))
        for each in call.counted
    ]
    unknown = [place.get(id(each), each) for each in call.unknown]

    def moved(sources: Sources) -> Sources:
        return frozenset(
            id(place[each]) if each in place else each for each in sources
        )

    return call._replace(
        counted=counted,
        unknown=unknown,
        reached=list(map(moved, call.reached)),
        chosen=frozenset(map(moved, call.chosen)),
    )


def _through(call: Call, flow: Flow) -> Callable[..., list[Sources]]:
    """Return how sources pass through a call, with its choices noted."""

    def through(operands: list[Sources]) -> list[Sources]:
        def found(sources: Sources) -> Sources:
            return NONE.union(
                *(
                    operands[each.number]
                    if isinstance(each, Given)
                    else frozenset([each])
                    for each in sources
                )
            )

        flow.chosen.update(map(found, call.chosen))
        return list(map(found, call.reached))

    return through


def _with_sources(call: Call, flow: Flow, here: keras.Layer) -> Call:
    """Return a call with the sources that were followed in its program."""

    def named(sources: Sources) -> Sources:
        return frozenset(id(here) if x == HERE else x for x in sources)

    return call._replace(
        reached=list(map(named, flow.returned)),
        chosen=frozenset(map(named, flow.chosen)),
    )


def _symbolic(nested: Any) -> list[keras.KerasTensor]:
    leaves = keras.tree.flatten(nested)
    return [x for x in leaves if isinstance(x, keras.KerasTensor)]


def _described(x: Any) -> Any:
    if not _is_array(x):
        return x
    dtype = keras.backend.standardize_dtype(x.dtype)
    return keras.KerasTensor(tuple(x.shape), dtype)


def _zeros(x: Any) -> Any:
    return (
        ops.zeros(x.shape, x.dtype) if isinstance(x, keras.KerasTensor) else x
    )


def multiplies_in_float8(layer: keras.Layer) -> bool:
    """Return True if a layer's forward matmul reads quantized inputs."""
    policy = float8_policy_of(layer)
    if policy is None:
        return False
    return policy.recipe.quantization("inputs", "forward") is not None


def _sizes(product: MatmulSizes) -> tuple[int, ...]:
    return product.multiplications, *sorted(product.sizes)


def _counted(layer: keras.Layer, found: Any) -> list[Counted]:
    return [
        Counted(layer, each.product, each.has_float8_form) for each in found
    ]


def _times(counted: Iterable[Counted], steps: int) -> list[Counted]:
    return [
        each._replace(product=each.product.times(steps)) for each in counted
    ]


def _says_its_outputs(layer: keras.Layer) -> bool:
    names = ("compute_output_shape", "compute_output_spec")
    cls = type(layer)
    return any(
        getattr(cls, name) is not getattr(keras.Layer, name) for name in names
    )


def _check_built(layer: keras.Layer) -> None:
    """Raise if a call of this layer would create weights."""
    if not layer.built and type(layer).build is not keras.Layer.build:
        raise ValueError(f"Layer {layer.name!r} is not built.")


def _convolved(contraction: Any, inputs: Shape, kernel: Shape) -> Any:
    """Return the shape of the outputs of a convolution."""
    shape = list(inputs)
    if not contraction.is_transposed:
        # Keras infers no shape where the kernel is of one of several groups.
        last = contraction.data_format == "channels_last"
        shape[-1 if last else 1] = kernel[-2]
    operands = map(keras.KerasTensor, (shape, kernel))
    return contraction.of(*operands).shape


def _counting(tracer: _Tracer) -> AbstractContextManager[None]:
    """Return a block in which float8 matmuls are counted, not computed."""

    def count(call: seams.ContractionCall) -> Any:
        if call.weight is None:
            contraction: Any = call.contraction
            operands = [ops.cast(x, call.dtype) for x in call.operands]
            return ops.einsum(contraction.equation, *operands)
        if isinstance(call.contraction, contractions.Einsum):
            equation = call.contraction.equation
            product = traced_programs.einsum(equation, *call.shapes)
            outputs = equations.outputs_shape(equation, *call.shapes)
        else:
            outputs = _convolved(call.contraction, *call.shapes)
            product = convolution(call.contraction, *call.shapes, outputs)
        zeros = ops.zeros(outputs, call.dtype)
        inputs, kernel = call.operands
        return tracer.multiplied(call.layer, product, inputs, kernel, zeros)

    return seams.on_contraction(count)
