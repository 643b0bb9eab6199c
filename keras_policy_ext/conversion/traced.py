"""Find the matmuls of a model's call by tracing it with shapes only.

The framework traces the call of each layer. The layers that it calls are
replaced by zeros of their output shapes, and traced on their own. Layers that
are alike are traced once. The matmuls of Keras's own layers with their kernels
are computed from the shapes of their inputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends, contractions
from keras_policy_ext._keras import calls, variable_values, walking
from keras_policy_ext._keras.calls import in_place_of
from keras_policy_ext.backends import tracing
from keras_policy_ext.backends.tracing import Product
from keras_policy_ext.contractions import equations
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.layers.operands import MovedKernel
from keras_policy_ext.layers.state import Float8State
from keras_policy_ext.policies.of_layers import float8_policy_of

Shape = Sequence[int]


class StockProduct(NamedTuple):
    """A matmul or convolution of a stock layer, with its sizes.

    Attributes:
        product: The sizes of the matmul.
        has_float8_form: Whether it is in float8 if the layer is.
        shape: Of the outputs, if `compute_output_spec` does not give it.
    """

    product: Product
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
        return [StockProduct(tracing.matmul(shape, kernel))]
    if name == "EinsumDense":
        kernel = tuple(variable_values.stored_kernel(layer).shape)
        ranks = len(shape), len(kernel)
        equation = equations.explicit(layer.equation, *ranks)
        product = tracing.einsum(equation, shape, kernel)
        tensors = map(keras.KerasTensor, (shape, kernel))
        outputs = keras.ops.einsum(equation, *tensors).shape
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
        StockProduct(tracing.convolution(positions, (batch,), kernel.shape))
        for kernel in kernels
    ]


def convolution(
    contraction: Any, inputs: Shape, kernel: Shape, outputs: Shape
) -> Product:
    """Return multiplications and operand sizes of a convolution."""
    counted = inputs if contraction.is_transposed else outputs
    return tracing.convolution(_positions(contraction, counted), inputs, kernel)


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

    def product(*kernel: int) -> Product:
        return tracing.convolution(positions, shape, kernel)

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
        in_float8: Whether it is computed in float8.
    """

    layer: keras.Layer
    product: Product
    in_float8: bool


class Call(NamedTuple):
    """The result of tracing one call: outputs, matmuls, unknown layers.

    Attributes:
        outputs: A structure with a `keras.KerasTensor` for each tensor.
        counted: Its matmuls.
        unknown: Layers that may have more matmuls, or repeat them more often.
    """

    outputs: Any
    counted: list[Counted]
    unknown: list[keras.Layer]


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
    tracer = _Tracer()
    with contextlib.ExitStack() as stack:
        stack.enter_context(keras.StatelessScope())
        stack.enter_context(keras.SymbolicScope())
        stack.enter_context(calls.instead_of_each_call(tracer.called))
        for scope in _contractions(tracer):
            stack.enter_context(scope)
        stack.enter_context(_attributes_kept(layer))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        return [tracer.trace(layer, *each) for each in arguments]


@dataclasses.dataclass
class _Frame:
    """The matmuls found so far in the layer whose call is being traced."""

    layer: keras.Layer
    entered: bool = False
    counted: list[Counted] = dataclasses.field(default_factory=list)
    unknown: list[keras.Layer] = dataclasses.field(default_factory=list)


class _Tracer:
    """Traces calls of layers; layers of equal structure are traced once."""

    def __init__(self) -> None:
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
        if any(isinstance(x, keras.KerasTensor) for x in given):
            return stock(layer, *args, **kwargs)  # Keras asks for a shape.
        found = self.trace(
            layer, *keras.tree.map_structure(_described, (args, kwargs))
        )
        frame.counted += found.counted
        frame.unknown += found.unknown
        return keras.tree.map_structure(_zeros, found.outputs)

    def note(self, layer: keras.Layer, product: Product) -> None:
        """Record a matmul of a float8 layer in the call being traced."""
        in_float8 = multiplies_in_float8(layer)
        self._frames[-1].counted.append(Counted(layer, product, in_float8))

    def trace(
        self, layer: keras.Layer, args: Any, kwargs: dict[str, Any]
    ) -> Call:
        """Trace a call; for a layer like a traced one, copy the result."""
        self._kept.append((args, kwargs))  # No other object gets an id of it.
        key = self._structure(layer), _hashable(args), _hashable(kwargs)
        if key not in self._known:
            self._known[key] = layer, self._found(layer, args, kwargs)
            return self._known[key][1]
        other, call = self._known[key]
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
        return Call(outputs, [], within)

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
                return Call(outputs, _counted(layer, found), [])
        if len(args) == 1 and runs_stock_call(layer):
            if isinstance(layer, keras.Sequential):
                return self._in_turn(layer, args[0])
            if walking.uses_in_graph(layer):
                return self._by_graph(layer, args[0])
        return self._by_program(layer, args, kwargs)

    def _in_turn(self, model: keras.Sequential, inputs: Any) -> Call:
        call = Call(inputs, [], [])
        for layer in model.layers:
            found = self.trace(layer, (call.outputs,), {})
            call = Call(
                found.outputs,
                call.counted + found.counted,
                call.unknown + found.unknown,
            )
        return call

    def _by_graph(self, model: keras.Model, inputs: Any) -> Call:
        """Trace a Functional model one operation of its graph at a time."""
        frame = _Frame(model)

        def call(operation: keras.Operation, *args: Any, **kwargs: Any) -> Any:
            if isinstance(operation, keras.Layer):
                found = self.trace(operation, args, kwargs)
            elif type(operation).__name__ in _PRODUCTS:
                found = self._by_program(operation, args, kwargs, model)
            else:
                return operation.compute_output_spec(*args, **kwargs)
            frame.counted += found.counted
            frame.unknown += found.unknown
            return found.outputs

        given = keras.tree.flatten(inputs)
        outputs = walking.follow_graph(model, given, call)
        structure = keras.tree.pack_sequence_as(model.output, outputs)
        return Call(structure, frame.counted, frame.unknown)

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
        frame = _Frame(layer)

        def function(*values: Any) -> Any:
            waiting = iter(values)
            filled = [
                next(waiting) if isinstance(x, keras.KerasTensor) else x
                for x in given
            ]
            # A function may be called again, where its first trace failed.
            vars(frame).update(vars(_Frame(layer)))
            passed = keras.tree.pack_sequence_as((args, kwargs), filled)
            return layer(*passed[0], **passed[1])

        self._frames.append(frame)
        try:
            found = backends.current.trace(function, tensors)
        finally:
            self._frames.pop()
        here = owner or layer
        plain = [Counted(here, each, False) for each in found.products]
        unknown = [] if found.is_complete else [here]
        return Call(
            found.outputs, frame.counted + plain, frame.unknown + unknown
        )

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
            return Call(outputs, _times(counted, steps), [])
        states = keras.tree.map_structure(
            _described, layer.get_initial_state(batch)
        )
        step = keras.KerasTensor((batch, *rest), args[0].dtype)
        found = self.trace(layer.cell, (step, states), {})
        return Call(outputs, _times(found.counted, steps), found.unknown)

    def _time_distributed(self, layer: keras.Layer, inputs: Any) -> Call:
        batch, steps, *rest = inputs.shape
        step = keras.KerasTensor((batch, *rest), inputs.dtype)
        found = self.trace(layer.layer, (step,), {})
        shape = (batch, steps, *found.outputs.shape[1:])
        outputs = keras.KerasTensor(shape, found.outputs.dtype)
        return Call(outputs, _times(found.counted, steps), found.unknown)

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


# Operations that may be in the graph of a model, and multiply.
_PRODUCTS = frozenset(
    (
        *("Matmul", "Einsum", "Dot", "Vdot", "Inner", "Tensordot", "Conv"),
        *("DepthwiseConv", "SeparableConv", "ConvTranspose", "Bilinear"),
    )
)

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
    return Call(call.outputs, counted, unknown)


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


def _counted(layer: keras.Layer, found: Any) -> list[Counted]:
    in_float8 = multiplies_in_float8(layer)
    return [
        Counted(layer, each.product, in_float8 and each.has_float8_form)
        for each in found
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


@contextlib.contextmanager
def _attributes_kept(layer: keras.Layer) -> Iterator[None]:
    """On exit of the block, restore attributes that calls have assigned."""
    held = [(each, dict(vars(each))) for each in walking.layers_within(layer)]
    try:
        yield
    finally:
        for each, before in held:
            now = vars(each)
            for name in [name for name in now if name not in before]:
                del now[name]
            for name, value in before.items():
                if name not in now or now[name] is not value:
                    now[name] = value


def _contractions(tracer: _Tracer) -> Iterator[Any]:
    """Yield scopes in which float8 matmuls are counted, not computed."""

    def contract(
        stock: Any,
        layer: keras.Layer,
        contraction: Any,
        inputs: Any,
        kernel: Any,
        training: bool | None,
        dtype: Any = None,
        bias: Any = None,
        moved: MovedKernel | None = None,
    ) -> Any:
        read = kernel if moved is None else moved
        shapes = tuple(inputs.shape), tuple(read.shape)
        if isinstance(contraction, contractions.Einsum):
            equation = contraction.equation
            product = tracing.einsum(equation, *shapes)
            outputs = ops.einsum(equation, *map(keras.KerasTensor, shapes))
        else:
            outputs = contraction.of(*map(keras.KerasTensor, shapes))
            product = convolution(contraction, *shapes, outputs.shape)
        tracer.note(layer, product)
        return ops.zeros(outputs.shape, dtype or layer.compute_dtype)

    def of_activations(
        stock: Any,
        layer: keras.Layer,
        equation: str,
        first: Any,
        second: Any,
        dtype: str | None = None,
    ) -> Any:
        dtype = dtype or layer.compute_dtype
        return ops.einsum(
            equation, *(ops.cast(x, dtype) for x in (first, second))
        )

    mixin = Float8Mixin
    yield in_place_of("_contract", contract, mixin)
    yield in_place_of("float8_activations_einsum", of_activations, mixin)
