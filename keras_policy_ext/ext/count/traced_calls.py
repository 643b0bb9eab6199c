"""Trace a model's call with shapes only, one layer at a time.

The framework traces the call of each layer. The layers that it calls are
replaced by zeros of their output shapes, and traced on their own. Layers that
are alike are traced once. Keras's own layers with a kernel are not traced: the
shapes of their outputs are known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_policy_ext import backends, contractions, seams
from keras_policy_ext._keras import variable_values, walking
from keras_policy_ext.contractions import equations
from keras_policy_ext.conversion.traced_model import (
    check_built,
    described,
    is_array,
    says_its_outputs,
    shapes_only,
    zeros,
)
from keras_policy_ext.conversion.work import (
    RUN_OTHER_CODE,
    keras_class,
    runs_stock_call,
)
from keras_policy_ext.layers.state import Float8State
from keras_policy_ext.policies.of_layers import multiplies_in_float8

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


def stock_multiplies(layer: keras.Layer) -> bool | None:
    """Return True if a stock layer multiplies with a kernel when it is called.

    None for a layer of another class, or with its own `call` or layers.
    """
    name = keras_class(layer).__name__
    if name in RUN_OTHER_CODE or not runs_stock_call(layer):
        return None
    if name in _MULTIPLYING:
        return True
    inner = walking.layers_within(layer)[1:]
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


class Call(NamedTuple):
    """The result of tracing one call.

    Attributes:
        outputs: A structure with a `keras.KerasTensor` for each tensor.
        counted: What a counter has counted in it, each with a field `layer`.
    """

    outputs: Any
    counted: Sequence[Any] = ()


def trace(
    layer: keras.Layer,
    arguments: Iterable[tuple[Any, dict[str, Any]]],
    tracer: Tracer,
) -> list[Call]:
    """Trace calls of a layer with shapes only; nothing is computed or changed.

    Args:
        layer: A layer that is built.
        arguments: For each call the positional and the keyword arguments, with
            a `keras.KerasTensor` of known shape for each tensor.
        tracer: What traces them.

    Raises:
        Exception: If a call raises it.
    """
    with (
        shapes_only(layer, tracer.called, tracer.contracted),
        tracer.counting(),
    ):
        return [tracer.trace(layer, *each) for each in arguments]


@dataclasses.dataclass
class _Frame:
    """Collects what is counted in the layer that is traced; see `Call`."""

    layer: keras.Layer
    entered: bool = False  # Whether the call of the layer itself has begun.
    counted: list[Any] = dataclasses.field(default_factory=list)


class Tracer:
    """Traces calls of layers; layers of equal structure are traced once.

    A counter derives from it. The methods whose names begin with `count`, and
    `counting`, are its own: here they count nothing.
    """

    def __init__(self) -> None:
        # By structure and arguments, the layer that was traced and its call.
        self._calls: dict[Any, tuple[keras.Layer, Call]] = {}
        self._kinds: dict[int, Any] = {}  # By the id of a layer.
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
        if any(isinstance(x, keras.KerasTensor) for x in values):
            return stock(layer, *args, **kwargs)  # Keras asks for a shape.
        call = self.trace(
            layer, *keras.tree.map_structure(described, (args, kwargs))
        )
        frame.counted += call.counted
        return keras.tree.map_structure(zeros, call.outputs)

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
        self._frames[-1].counted += self.count_contraction(call, shape)
        return ops.zeros(shape, call.dtype)

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
        return call if layer is other else _call_of_equal(call, other, layer)

    def _traced_or_described(
        self, layer: keras.Layer, args: Any, kwargs: dict[str, Any]
    ) -> Call:
        """Trace a call; if it fails, ask the layer for its output spec."""
        try:
            return self._traced(layer, args, kwargs)
        # The code is the user's, and may raise anything.
        except Exception:
            if not says_its_outputs(layer):
                raise
        outputs = layer.compute_output_spec(*args, **kwargs)
        return Call(outputs, self.count_untraced(layer))

    def _traced(
        self, layer: keras.Layer, args: Any, kwargs: dict[str, Any]
    ) -> Call:
        """Return the call of a layer, traced or known by its class."""
        if isinstance(layer, keras.layers.RNN):
            return self._recurrent(layer, args, kwargs)
        if isinstance(layer, keras.layers.TimeDistributed):
            return self._time_distributed(layer, args[0])
        is_on_tensor = args and isinstance(args[0], keras.KerasTensor)
        if is_on_tensor and stock_multiplies(layer) is not None:
            counted = self.count_stock(layer, args[0].shape)
            return Call(_stock_outputs(layer, args, kwargs), counted)
        if len(args) == 1 and runs_stock_call(layer):
            if isinstance(layer, keras.Sequential):
                return self._in_turn(layer, args[0])
            if getattr(layer, "operations", None):  # Functional.
                return self._by_graph(layer, args[0])
        return self._by_program(layer, args, kwargs)

    def _in_turn(self, model: keras.Sequential, inputs: Any) -> Call:
        """Trace a Sequential model one layer at a time."""
        counted: list[Any] = []
        for layer in model.layers:
            call = self.trace(layer, (inputs,), {})
            counted += call.counted
            inputs = call.outputs
        return Call(inputs, counted)

    def _by_graph(self, model: keras.Model, inputs: Any) -> Call:
        """Trace a Functional model one operation of its graph at a time."""
        counted: list[Any] = []

        def call(operation: keras.Operation, *args: Any, **kwargs: Any) -> Any:
            if isinstance(operation, keras.Layer):
                found = self.trace(operation, args, kwargs)
            elif type(operation).__name__ in _PRODUCTS:
                found = self._by_program(operation, args, kwargs, model)
            else:
                return operation.compute_output_spec(*args, **kwargs)
            counted.extend(found.counted)
            return found.outputs

        input_tensors = keras.tree.flatten(inputs)
        outputs = walking.follow_graph(model, input_tensors, call)
        structure = keras.tree.pack_sequence_as(model.output, outputs)
        return Call(structure, counted)

    def _by_program(
        self,
        layer: keras.Layer,
        args: Any,
        kwargs: dict[str, Any],
        owner: keras.Layer | None = None,
    ) -> Call:
        """Trace `call` of a layer, or an operation in the graph of `owner`."""
        if owner is None:
            check_built(layer)
        arguments = keras.tree.flatten((args, kwargs))
        tensors = [x for x in arguments if isinstance(x, keras.KerasTensor)]
        frame = _Frame(layer)

        def function(*values: Any) -> Any:
            waiting = iter(values)
            filled = [
                next(waiting) if isinstance(x, keras.KerasTensor) else x
                for x in arguments
            ]
            # A function may be called again, where its first trace failed.
            vars(frame).update(vars(_Frame(layer)))
            structure = (args, kwargs)
            given, named = keras.tree.pack_sequence_as(structure, filled)
            return layer(*given, **named)

        self._frames.append(frame)
        here = owner or layer  # The layer whose own products these are.
        try:
            traced = backends.current.trace(function, tensors)
            counted = self.count_program(here, traced.program)
        finally:
            self._frames.pop()
        return Call(traced.outputs, [*frame.counted, *counted])

    def _recurrent(
        self, layer: keras.Layer, args: Any, kwargs: dict[str, Any]
    ) -> Call:
        """Trace an RNN layer by one call of its cell."""
        batch, steps, *rest = args[0].shape
        outputs = layer.compute_output_spec(*args, **kwargs)
        cells = getattr(layer.cell, "cells", [layer.cell])  # If stacked.
        if all(map(is_stock_cell, cells)):
            counts = [self.count_cell(cell, (batch, *rest)) for cell in cells]
            counted = [*itertools.chain(*counts)]
            return Call(outputs, self.count_steps(counted, steps))
        states = keras.tree.map_structure(
            described, layer.get_initial_state(batch)
        )
        step = keras.KerasTensor((batch, *rest), args[0].dtype)
        found = self.trace(layer.cell, (step, states), {})
        return Call(outputs, self.count_steps(found.counted, steps))

    def _time_distributed(self, layer: keras.Layer, inputs: Any) -> Call:
        """Return the call of a layer on each step of its inputs."""
        batch, steps, *rest = inputs.shape
        step = keras.KerasTensor((batch, *rest), inputs.dtype)
        found = self.trace(layer.layer, (step,), {})
        shape = (batch, steps, *found.outputs.shape[1:])
        outputs = keras.KerasTensor(shape, found.outputs.dtype)
        return Call(outputs, self.count_steps(found.counted, steps))

    def _structure(self, layer: keras.Layer) -> Any:
        """Return a key that is equal for layers with equal calls."""
        within = walking.layers_within(layer)
        # What a layer holds, and where, is in its attributes.
        return tuple(
            self._kind(x) for x in within if not isinstance(x, Float8State)
        )

    def _kind(self, layer: keras.Layer) -> Any:
        """Return what tells a layer from others, without the layers in it."""
        if id(layer) not in self._kinds:
            attributes = tuple(
                (name, _hashable(value))
                for name, value in vars(layer).items()
                if name not in self._of_every_layer
                and not _OF_ONE_LAYER.search(name)
            )
            kind = type(layer), multiplies_in_float8(layer), attributes
            self._kinds[id(layer)] = kind
        return self._kinds[id(layer)]


# Operations that may be in the graph of a model, and multiply.
_PRODUCTS = frozenset(
    (
        *("Matmul", "Einsum", "Dot", "Vdot", "Inner", "Tensordot", "Conv"),
        *("DepthwiseConv", "SeparableConv", "ConvTranspose", "Bilinear"),
    )
)

# Parts of names of attributes that differ between equal layers.
_OF_ONE_LAYER = re.compile("name|path|^_self_|float8|_given_by_keras")


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
    if is_array(value):
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
    return call._replace(counted=counted)


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
