"""Trace a model's call with shapes only: what it calls, and what it chooses.

The framework traces the call of each layer. The layers that it calls are
replaced by zeros of their output shapes, and traced on their own. Layers that
are alike are traced once. Keras's own layers with a kernel are not traced: the
shapes of their outputs are known.

A `Flow` follows, in one program, which products and arguments (`Sources`) reach
each tensor. The call of an inner layer is marked in the outer program, with a
function from the sources of its operands to those of its results.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
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
from keras_policy_ext.backends.traced_programs import (
    HERE,
    NONE,
    Flow,
    Given,
    Sources,
)
from keras_policy_ext.contractions import equations
from keras_policy_ext.layers.by_operation import note_call
from keras_policy_ext.layers.state import Float8State
from keras_policy_ext.layers.transaction import undone
from keras_policy_ext.policies.of_layers import float8_policy_of

Shape = Sequence[int]

_MULTIPLYING = frozenset(
    (
        *("Dense", "EinsumDense"),
        *(
            name
            for rank in ("1D", "2D", "3D")
            for name in (
                *(f"Conv{rank}", f"Conv{rank}Transpose"),
                *(f"DepthwiseConv{rank}", f"SeparableConv{rank}"),
            )
        ),
    )
)
_CELLS = ("SimpleRNNCell", "GRUCell", "LSTMCell", "ConvLSTMCell")

# Classes of Keras, without layers in them, that run code of their subclass or
# of what they are given; the last one multiplies only if an argument says so.
RUN_OTHER_CODE = frozenset(
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


def stock_multiplies(layer: keras.Layer) -> bool | None:
    """Return True if a stock layer multiplies with a kernel when it is called.

    None for a layer of another class, or with its own `call` or layers.
    """
    name = keras_class(layer).__name__
    if name in RUN_OTHER_CODE or not runs_stock_call(layer):
        return None
    if name in _MULTIPLYING:
        return True
    inner = walking.layers_directly_in(layer)
    if any(not isinstance(each, Float8State) for each in inner):
        return None
    return False  # Such as an activation or a normalization.


def is_stock_cell(cell: Any) -> bool:
    """Return True if a recurrent cell computes as Keras's does."""
    return keras_class(cell).__name__ in _CELLS and runs_stock_call(cell)


def einsum_of(layer: Any, shape: Shape) -> tuple[str, tuple[int, ...]]:
    """Return the explicit equation and kernel shape of an `EinsumDense`."""
    kernel = tuple(variable_values.stored_kernel(layer).shape)
    equation = equations.explicit(layer.equation, len(shape), len(kernel))
    return equation, kernel


def runs_stock_call(layer: keras.Layer) -> bool:
    """Return True if a layer's `call` is Keras's, or the float8 form's."""
    owner = next(base for base in type(layer).__mro__ if "call" in vars(base))
    package = owner.__module__.partition(".")[0]
    return package in ("keras", "keras_policy_ext")


class Call(NamedTuple):
    """The result of tracing one call.

    Attributes:
        outputs: A structure with a `keras.KerasTensor` for each tensor.
        counted: What a counter has counted in it, each with a field `layer`.
        chooses: Whether a layer in it looks for the largest or smallest
            entries of a tensor.
        reached: For each tensor of the outputs, its sources: the `id` of each
            layer whose products reach it, and `Given` for arguments. Empty
            unless the tracer follows them, as is `chosen`.
        chosen: For each choice in it, the sources among whose entries it
            chooses.
    """

    outputs: Any
    counted: Sequence[Any] = ()
    chooses: bool = False
    reached: Sequence[Sources] = ()
    chosen: frozenset[Sources] = frozenset()


def trace(
    layer: keras.Layer,
    arguments: Iterable[tuple[Any, dict[str, Any]]],
    tracer: Tracer | None = None,
) -> list[Call]:
    """Trace calls of a layer with shapes only; nothing is computed or changed.

    Args:
        layer: A layer that is built.
        arguments: For each call the positional and the keyword arguments, with
            a `keras.KerasTensor` of known shape for each tensor.
        tracer: What traces them; None for `Tracer()`.

    Raises:
        Exception: If a call raises it.
    """
    tracer = tracer or Tracer()
    token = _TRACER.set(tracer)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(keras.StatelessScope())
            stack.enter_context(keras.SymbolicScope())
            stack.enter_context(calls.instead_of_each_call(tracer.called))
            stack.enter_context(seams.on_contraction(tracer.contracted))
            stack.enter_context(tracer.counting())
            stack.enter_context(undone(walking.layers_within(layer)))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            return [tracer.trace(layer, *each) for each in arguments]
    finally:
        _TRACER.reset(token)


def mark(
    operands: Sequence[Any], result: Any, through: Callable[[Sources], Sources]
) -> Any:
    """Mark an operation in the program of the call that is being traced.

    Args:
        operands: Its tensors.
        result: Its result.
        through: Maps the sources that reach the operands to those of the
            result.

    Returns:
        The result to go on with.
    """
    tracer = _TRACER.get()
    return result if tracer is None else tracer.mark(operands, result, through)


@dataclasses.dataclass
class _Frame:
    """Collects what is found in the layer that is traced; see `Call`."""

    layer: keras.Layer
    entered: bool = False  # Whether the call of the layer itself has begun.
    # As in `Call`; `chooses` too.
    counted: list[Any] = dataclasses.field(default_factory=list)
    chooses: bool = False
    flow: Flow | None = None  # Where sources go; None if not followed.

    def add(self, call: Call) -> None:
        """Add what was found in a call of an inner layer."""
        self.counted += call.counted
        self.chooses = self.chooses or call.chooses


class Tracer:
    """Traces calls of layers; layers of equal structure are traced once.

    A counter derives from it. The methods whose names begin with `count`, and
    `counting`, are its own: here they count nothing.

    Args:
        follows: Whether to find the sources of outputs and choices.
        within: Classes of inner layers whose operations count as operations of
            the layer that calls them.
    """

    def __init__(
        self, follows: bool = False, within: tuple[type, ...] = ()
    ) -> None:
        self._follows = follows
        self._within = within
        # By structure and arguments, the layer that was traced and its call.
        self._calls: dict[Any, tuple[keras.Layer, Call]] = {}
        self._structures: dict[int, Any] = {}  # By the id of a layer.
        self._frames: list[_Frame] = []  # The innermost last.
        self._kept_alive: list[Any] = []  # So that no id is used again.
        # Attributes that say nothing about the call of a layer.
        self._of_every_layer = {
            *vars(keras.layers.Layer(name="layer")),
            "_build_shapes_dict",
        }

    @property
    def traced_layer(self) -> keras.Layer:
        """The layer or operation whose program is being traced."""
        return self._frames[-1].layer

    def counting(self) -> AbstractContextManager[Any]:
        """Return the block in which all calls are traced."""
        return contextlib.nullcontext()

    # The counts returned have the form of the class that counts: here none.
    def count_stock(self, layer: keras.Layer, shape: Shape) -> list[Any]:
        """Count in the call of a stock layer on a tensor of this shape."""
        return []

    def count_cell(self, cell: Any, shape: Shape) -> list[Any]:
        """Count in one step of a stock cell, with the shape of its inputs."""
        return []

    def count_contraction(
        self, call: seams.ContractionCall, outputs: Shape
    ) -> list[Any]:
        """Count in a float8 contraction, whose outputs have this shape."""
        return []

    def count_program(self, layer: keras.Layer, program: Any) -> list[Any]:
        """Count in the program of a layer; see `TracedProgram`."""
        return []

    def count_untraced(self, layer: keras.Layer) -> list[Any]:
        """Count in a call that cannot be traced."""
        return []

    def count_steps(self, counted: Sequence[Any], steps: int) -> list[Any]:
        """Count in a call that repeats another one."""
        return []

    def called(
        self, stock: Any, layer: keras.Layer, *args: Any, **kwargs: Any
    ) -> Any:
        """Trace the call of an inner layer, and return zeros as its outputs."""
        frame, values = self._frames[-1], keras.tree.flatten((args, kwargs))
        if layer is frame.layer and not frame.entered:
            frame.entered = True
            return stock(layer, *args, **kwargs)
        is_part = type(layer) in self._within  # Of the layer that calls it.
        if is_part or any(isinstance(x, keras.KerasTensor) for x in values):
            return stock(layer, *args, **kwargs)  # Keras asks for a shape.
        call = self.trace(
            layer, *keras.tree.map_structure(_described, (args, kwargs))
        )
        frame.add(call)
        outputs = keras.tree.map_structure(_zeros, call.outputs)
        return self._marked(call, values, outputs)

    def contracted(self, call: seams.ContractionCall) -> Any:
        """Return zeros for a float8 contraction, which is not computed."""
        if call.weight is None:  # Two activations: traced as an einsum.
            activations: Any = call.contraction
            operands = [ops.cast(x, call.dtype) for x in call.operands]
            return ops.einsum(activations.equation, *operands)
        if isinstance(call.contraction, contractions.Einsum):
            equation = call.contraction.equation
            shape = equations.outputs_shape(equation, *call.shapes)
        else:
            shape = _convolved(call.contraction, *call.shapes)
        outputs = ops.zeros(shape, call.dtype)
        counted = self.count_contraction(call, shape)
        sources = frozenset([id(call.layer)])
        traced = Call(outputs, counted, reached=[sources])
        self._frames[-1].add(traced)
        inputs, _ = call.operands
        return self._marked(traced, [inputs], outputs)

    def mark(
        self,
        operands: Sequence[Any],
        result: Any,
        through: Callable[[Sources], Sources],
    ) -> Any:
        """Mark an operation in the innermost program; return its result."""
        flow = self._frames[-1].flow if self._frames else None
        if flow is None:
            return result
        number = flow.new_call(
            lambda sources: [through(NONE.union(*sources))], results=1
        )
        tensors = [ops.convert_to_tensor(x) for x in operands]
        (marked,) = backends.current.mark_call(flow, number, tensors, [result])
        return marked

    def _marked(self, call: Call, arguments: list[Any], outputs: Any) -> Any:
        """Mark a call in the innermost program; return its outputs."""
        flow = self._frames[-1].flow
        if flow is None:
            return outputs
        leaves = keras.tree.flatten(outputs)
        places = [n for n, x in enumerate(leaves) if ops.is_tensor(x)]
        marked = backends.current.mark_call(
            flow,
            flow.new_call(_sources_through(call, flow), results=len(places)),
            [ops.convert_to_tensor(x) for x in arguments if _is_array(x)],
            [leaves[place] for place in places],
        )
        for place, tensor in zip(places, marked, strict=True):
            leaves[place] = tensor
        return keras.tree.pack_sequence_as(outputs, leaves)

    def trace(
        self, layer: keras.Layer, args: Any, kwargs: dict[str, Any]
    ) -> Call:
        """Trace a call; for a layer like a traced one, copy the result."""
        self._kept_alive.append((args, kwargs))  # The key may have their ids.
        key = self._structure(layer), _hashable(args), _hashable(kwargs)
        if key not in self._calls:
            found = self._traced_or_described(layer, args, kwargs)
            self._calls[key] = layer, found
        other, call = self._calls[key]
        note_call(layer, other)  # Records of `layer` are those of `other`.
        return call if layer is other else _call_of_equal(call, other, layer)

    def _traced_or_described(
        self, layer: keras.Layer, args: Any, kwargs: dict[str, Any]
    ) -> Call:
        """Trace a call; if it fails, ask the layer for its output spec."""
        try:
            return self._traced(layer, args, kwargs)
        # The code is the user's, and may raise anything.
        except Exception:
            if not _says_its_outputs(layer):
                raise
        outputs = layer.compute_output_spec(*args, **kwargs)
        return Call(
            outputs,
            self.count_untraced(layer),
            reached=[NONE] * len(_symbolic(outputs)),
        )

    def _traced(
        self, layer: keras.Layer, args: Any, kwargs: dict[str, Any]
    ) -> Call:
        """Return the call of a layer, traced or known by its class."""
        if isinstance(layer, keras.layers.RNN):
            return self._recurrent(layer, args, kwargs)
        if isinstance(layer, keras.layers.TimeDistributed):
            return self._time_distributed(layer, args[0])
        if args and isinstance(args[0], keras.KerasTensor):
            multiplies = stock_multiplies(layer)
            if multiplies is not None:
                counted = self.count_stock(layer, args[0].shape)
                outputs = _stock_outputs(layer, args, kwargs)
                # A product is a source; other layers pass on what they get.
                given = map(Given, range(len(_symbolic((args, kwargs)))))
                sources = frozenset([id(layer)] if multiplies else given)
                reached = [sources] * len(_symbolic(outputs))
                return Call(outputs, counted, reached=reached)
        if len(args) == 1 and runs_stock_call(layer):
            if isinstance(layer, keras.Sequential):
                return self._in_turn(layer, args[0])
            if walking.uses_in_graph(layer):
                return self._by_graph(layer, args[0])
        return self._by_program(layer, args, kwargs)

    def _in_turn(self, model: keras.Sequential, inputs: Any) -> Call:
        """Trace a Sequential model one layer at a time."""
        frame = self._new_frame(model, inputs)
        for layer in model.layers:
            call = self.trace(layer, (inputs,), {})
            frame.add(call)
            inputs = self._passed(frame, call, inputs)
        return self._finished(frame, inputs)

    def _new_frame(self, layer: keras.Layer, inputs: Any) -> _Frame:
        """Return a frame for a model whose layers are called in turn."""
        if not self._follows:
            return _Frame(layer)
        flow = Flow()
        flow.start(map(id, _symbolic(inputs)))
        return _Frame(layer, flow=flow)

    def _passed(self, frame: _Frame, call: Call, given: Any) -> Any:
        """Return the outputs of a call on `given`, to pass to other layers."""
        flow = frame.flow
        if flow is None:
            return call.outputs
        # New tensors: the sources of tensors are found by their ids, and calls
        # of layers that are alike have the same outputs.
        outputs = keras.tree.map_structure(_described, call.outputs)
        results = _symbolic(outputs)
        self._kept_alive.append((given, outputs))
        flow.called(
            flow.new_call(_sources_through(call, flow), results=len(results)),
            map(id, _symbolic(given)),
            map(id, results),
        )
        return outputs

    def _finished(self, frame: _Frame, outputs: Any) -> Call:
        """Return what a frame found as a call with these outputs."""
        call = Call(outputs, frame.counted, frame.chooses)
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
                    results = [(id(x), x.dtype) for x in _symbolic(outputs)]
                    self._kept_alive.append(((args, kwargs), outputs))
                    operands = map(id, _symbolic((args, kwargs)))
                    # No choice: those go through `_by_program` if followed.
                    frame.flow.computed("other", operands, results)
                return outputs
            frame.add(found)
            return self._passed(frame, found, (args, kwargs))

        input_tensors = keras.tree.flatten(inputs)
        outputs = walking.follow_graph(model, input_tensors, call)
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
        is_unbuilt = owner is None and not layer.built
        if is_unbuilt and type(layer).build is not keras.Layer.build:
            raise ValueError(f"Layer {layer.name!r} is not built.")
        arguments = keras.tree.flatten((args, kwargs))
        tensors = [x for x in arguments if isinstance(x, keras.KerasTensor)]
        flow = Flow() if self._follows else None
        frame = _Frame(layer, flow=flow)

        def function(*values: Any) -> Any:
            waiting = iter(values)
            filled = [
                next(waiting) if isinstance(x, keras.KerasTensor) else x
                for x in arguments
            ]
            # A function may be called again, where its first trace failed.
            vars(frame).update(vars(_Frame(layer, flow=flow)))
            structure = (args, kwargs)
            given, named = keras.tree.pack_sequence_as(structure, filled)
            return layer(*given, **named)

        self._frames.append(frame)
        here = owner or layer  # The layer whose own products these are.
        try:
            traced = backends.current.trace(function, tensors, flow)
            counted = self.count_program(here, traced.program)
        finally:
            self._frames.pop()
        call = Call(
            traced.outputs,
            [*frame.counted, *counted],
            frame.chooses or traced.chooses,
        )
        return call if flow is None else _with_sources(call, flow, here)

    def _recurrent(
        self, layer: keras.Layer, args: Any, kwargs: dict[str, Any]
    ) -> Call:
        """Trace an RNN layer by one call of its cell."""
        batch, steps, *rest = args[0].shape
        outputs = layer.compute_output_spec(*args, **kwargs)
        cells = getattr(layer.cell, "cells", [layer.cell])  # If stacked.
        if all(map(is_stock_cell, cells)):
            counts = [self.count_cell(cell, (batch, *rest)) for cell in cells]
            of_cells: Sources = frozenset(map(id, cells))
            return Call(
                outputs,
                self.count_steps([*itertools.chain(*counts)], steps),
                reached=[of_cells] * len(_symbolic(outputs)),
            )
        states = keras.tree.map_structure(
            _described, layer.get_initial_state(batch)
        )
        step = keras.KerasTensor((batch, *rest), args[0].dtype)
        found = self.trace(layer.cell, (step, states), {})
        # What reaches the states in a step is not followed. They are the
        # arguments of the cell after its inputs.
        numbers = range(1, 1 + len(_symbolic(states)))
        states_given = frozenset(map(Given, numbers))
        sources = NONE.union(*found.reached) - states_given
        return found._replace(
            outputs=outputs,
            counted=self.count_steps(found.counted, steps),
            reached=[sources] * len(_symbolic(outputs)),
            chosen=frozenset(each - states_given for each in found.chosen),
        )

    def _time_distributed(self, layer: keras.Layer, inputs: Any) -> Call:
        """Return the call of a layer on each step of its inputs."""
        batch, steps, *rest = inputs.shape
        step = keras.KerasTensor((batch, *rest), inputs.dtype)
        found = self.trace(layer.layer, (step,), {})
        shape = (batch, steps, *found.outputs.shape[1:])
        outputs = keras.KerasTensor(shape, found.outputs.dtype)
        return found._replace(
            outputs=outputs, counted=self.count_steps(found.counted, steps)
        )

    def _structure(self, layer: keras.Layer) -> Any:
        """Return a key that is equal for layers with equal calls."""
        if id(layer) not in self._structures:
            attributes = tuple(
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
            kind = type(layer), multiplies_in_float8(layer)
            self._structures[id(layer)] = *kind, attributes, inner
        return self._structures[id(layer)]


_TRACER: contextvars.ContextVar[Tracer | None] = contextvars.ContextVar(
    "tracer of the call that is being traced", default=None
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

# Parts of names of attributes that differ between equal layers.
_OF_ONE_LAYER = re.compile("name|path|^_self_|float8|_given_by_keras")


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
    package = type(value).__module__.partition(".")[0]
    if package in ("keras", "keras_policy_ext"):
        return type(value)  # Such as an initializer: it changes no shape.
    return id(value)


def _call_of_equal(call: Call, old: keras.Layer, new: keras.Layer) -> Call:
    """Copy a traced call of layer `old` as a call of the equal layer `new`."""
    within = zip(
        walking.layers_within(old), walking.layers_within(new), strict=True
    )
    place = {id(before): after for before, after in within}
    counted = [
        each._replace(layer=place.get(id(each.layer), each.layer))
        for each in call.counted
    ]

    def moved(sources: Sources) -> Sources:
        return frozenset(
            id(place[each]) if each in place else each for each in sources
        )

    return call._replace(
        counted=counted,
        reached=list(map(moved, call.reached)),
        chosen=frozenset(map(moved, call.chosen)),
    )


def _sources_through(call: Call, flow: Flow) -> Callable[..., list[Sources]]:
    """Return a function from the sources of operands to those of results."""
    # When it is called, it notes the choices of the call in the outer program.

    def through(operands: list[Sources]) -> list[Sources]:
        def in_outer(sources: Sources) -> Sources:
            return NONE.union(
                *(
                    operands[each.number]
                    if isinstance(each, Given)
                    else frozenset([each])
                    for each in sources
                )
            )

        flow.chosen.update(map(in_outer, call.chosen))
        return list(map(in_outer, call.reached))

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
    """Return the symbolic tensors in nested values, in their order."""
    leaves = keras.tree.flatten(nested)
    return [x for x in leaves if isinstance(x, keras.KerasTensor)]


def _described(x: Any) -> Any:
    """Return a new symbolic tensor like an array; other values themselves."""
    if not _is_array(x):
        return x
    dtype = keras.backend.standardize_dtype(x.dtype)
    return keras.KerasTensor(tuple(x.shape), dtype)


def _zeros(x: Any) -> Any:
    is_symbolic = isinstance(x, keras.KerasTensor)
    return ops.zeros(x.shape, x.dtype) if is_symbolic else x


def multiplies_in_float8(layer: keras.Layer) -> bool:
    """Return True if a layer's forward matmul reads quantized inputs."""
    policy = float8_policy_of(layer)
    if policy is None:
        return False
    return policy.recipe.quantization("inputs", "forward") is not None


def _stock_outputs(
    layer: keras.Layer, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Return the outputs of a stock layer that is called on one tensor."""
    outputs = layer.compute_output_spec(*args, **kwargs)
    if keras_class(layer).__name__ != "EinsumDense":
        return outputs
    # Its own shape of outputs has the sizes on which it was built.
    shape = args[0].shape
    equation, kernel = einsum_of(layer, shape)
    shape = equations.outputs_shape(equation, shape, kernel)
    return keras.KerasTensor(shape, outputs.dtype)


def _says_its_outputs(layer: keras.Layer) -> bool:
    """Return True if a class computes the shapes of its outputs."""
    names = ("compute_output_shape", "compute_output_spec")
    cls, base = type(layer), keras.Layer
    return any(getattr(cls, name) is not getattr(base, name) for name in names)


def _convolved(contraction: Any, inputs: Shape, kernel: Shape) -> Any:
    """Return the shape of the outputs of a convolution."""
    shape = list(inputs)
    if not contraction.is_transposed:
        # With groups the kernel has the channels of one; Keras then infers no
        # shape. So the inputs get as many.
        is_channels_last = contraction.data_format == "channels_last"
        shape[-1 if is_channels_last else 1] = kernel[-2]
    operands = map(keras.KerasTensor, (shape, kernel))
    return contraction.of(*operands).shape
