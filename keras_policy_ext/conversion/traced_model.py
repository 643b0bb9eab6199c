"""What a model's call does: traced with shapes only, on guessed arguments.

The framework traces the call, with all layers in it. Nothing is computed or
changed. Each call of a layer is a scope of the traced program (`in_scope`), so
that a product in the program is known to be that of a layer, whether Keras's
operations multiply or the framework's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends, contractions, seams
from keras_policy_ext._keras import calls, walking
from keras_policy_ext.backends.traced_programs import Flow
from keras_policy_ext.conversion.work import (
    RUN_OTHER_CODE,
    keras_class,
    runs_stock_call,
)
from keras_policy_ext.layers import by_operation
from keras_policy_ext.layers.attention_products import Multiplied, Softmax
from keras_policy_ext.layers.state import Float8State
from keras_policy_ext.layers.transaction import undone

SAMPLES = 2
"""The size of the batch that is traced."""


class TracedModel:
    """A model whose call is traced once, when it is first asked for.

    Args:
        model: A built model.
    """

    def __init__(self, model: keras.Layer) -> None:
        self.model = model

    @functools.cached_property
    def call(self) -> TracedCall | None:
        """The traced call; None if the model accepts no guessed arguments."""
        # A layer that cannot be traced fails, and only then counts as zeros.
        for may_skip in (False, True):
            for arguments in guesses(self.model):
                # The user's code may raise anything.
                with contextlib.suppress(Exception):
                    return _traced(self.model, arguments.of(SAMPLES), may_skip)
        return None

    @functools.cached_property
    def may_choose(self) -> bool:
        """False if the call of the model is known to choose nothing."""
        return any(map(_may_choose, walking.layers_within(self.model)))


class TracedCall:
    """Records what was found in a traced call of a model.

    Attributes:
        flow: Which products reach which tensors, and which choices. Sources are
            keys of `scopes`.
        scopes: By the number of a scope, what it is of: a layer, or the
            `Note` of a product of two activations or of a softmax.
        called: The `id` of each layer that was called.
        noted: What layers have computed by operations of Keras, in order.
    """

    flow: Flow

    def __init__(self) -> None:
        """Begin the record of a call; the trace fills its attributes."""
        self.scopes: dict[int, keras.Layer | Note] = {}
        self.called: set[int] = set()
        self.noted: list[Note] = []

    def scores(self) -> set[int]:
        """Return the `id` of each `Note` of a product that a softmax reads."""
        sources = {
            source
            for number, scope in self.scopes.items()
            if isinstance(scope, Note) and isinstance(scope.found, Softmax)
            for source in self.flow.read.get(number, ())
        }
        return {id(self.scopes[each]) for each in sources & self.scopes.keys()}

    def layers(self, sources: Iterable[int]) -> set[int]:
        """Return the `id` of each layer whose product may be a source."""
        found = set()
        for number in sources:
            scope = self.scopes.get(number)
            if isinstance(scope, Note):
                found.add(id(scope.layer))
            elif scope is not None:
                # Also of one in it that is called without Keras noticing, such
                # as in `TimeDistributed`, or in a function compiled before.
                within = walking.layers_within(scope)[1:]
                hidden = {id(x) for x in within} - self.called
                found |= {id(scope), *hidden}
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Note:
    """Records what a layer has computed; see `by_operation.recording`."""

    layer: Any
    found: Any


_NUMBERS = itertools.count()
_OF_LAYERS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _number(layer: keras.Layer) -> int:
    """Return the number of the scopes of a layer, the same in each trace."""
    # TensorFlow keeps the program of a `tf.function` that it traced before.
    return _OF_LAYERS.setdefault(layer, next(_NUMBERS))


def _traced(
    model: keras.Layer, arguments: tuple[Any, Any], may_skip: bool
) -> TracedCall:
    """Trace a call of a model.

    With `may_skip`, a layer that raises is asked for its output spec, and its
    outputs are zeros.
    """
    leaves = keras.tree.flatten(arguments)
    tensors = [x for x in leaves if isinstance(x, keras.KerasTensor)]
    call = TracedCall()

    def function(*values: Any) -> Any:
        """Call the model with values in the place of symbolic tensors."""
        # It may be called again, where its first trace failed.
        vars(call).update(vars(TracedCall()))
        for layer in walking.layers_within(model):
            call.scopes[_number(layer)] = layer
        waiting = iter(values)
        filled = [
            next(waiting) if isinstance(x, keras.KerasTensor) else x
            for x in leaves
        ]
        args, kwargs = keras.tree.pack_sequence_as(arguments, filled)
        return model(*args, **kwargs)

    def scope_of(layer: keras.Layer) -> Any:
        call.scopes[_number(layer)] = layer  # It may have been made in a call.
        return backends.current.in_scope(_number(layer))

    def called(
        stock: Any, layer: keras.Layer, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a layer in a scope; `stock` is what Keras would do."""
        given = keras.tree.flatten((args, kwargs))
        if any(isinstance(x, keras.KerasTensor) for x in given):
            return stock(layer, *args, **kwargs)  # Keras asks for a shape.
        check_built(layer)
        calls.rematerialize_nothing(layer)
        call.called.add(id(layer))
        with scope_of(layer):
            try:
                outputs = stock(layer, *args, **kwargs)
                by_operation.forget_weights(outputs)
                return outputs
            except Exception:
                if layer is model or not (may_skip and says_its_outputs(layer)):
                    raise
            # A Functional model passes `training` to layers, and what the user
            # has defined to say shapes may not take it.
            named = {k: v for k, v in kwargs.items() if k != "training"}
            shapes = keras.tree.map_structure(described, (args, named))
            outputs = layer.compute_output_spec(*shapes[0], **shapes[1])
            return keras.tree.map_structure(zeros, outputs)

    def contracted(contraction: seams.ContractionCall) -> Any:
        with scope_of(contraction.layer):
            return _in_floats(contraction)

    def note(layer: Any, found: Any) -> Any:
        """Note what a layer has computed; return the scope of a product."""
        noted = Note(layer, found)
        call.noted.append(noted)
        if not isinstance(found, (Multiplied, Softmax)):
            return None
        number = next(_NUMBERS)
        call.scopes[number] = noted
        return backends.current.in_scope(number)

    with shapes_only(model, called, contracted), by_operation.recording(note):
        program = backends.current.trace(function, tensors)
        steps = backends.current.steps(program.program)
        passing = {n for n, x in call.scopes.items() if _passes_on(x)}
        call.flow = Flow(steps, program.returned, passing)
    return call


_MODELS = ("Functional", "Sequential")
_GIVEN = ("activation", "recurrent_activation", "call")
"""Attributes in which a layer may have a function of the user."""


def _may_choose(layer: keras.Layer) -> bool:
    """Return True if other code than that of Keras's layers runs in a call."""
    # No stock layer looks for the largest entries of its inputs. In a graph
    # there may be operations; layers that hold only state compute nothing.
    if isinstance(layer, Float8State):
        return False
    given = filter(None, map(vars(layer).get, _GIVEN))
    if not all(map(_is_of_keras, (type(layer), *given))):
        return True
    name = keras_class(layer).__name__
    if name in _MODELS:
        operations = getattr(layer, "operations", ())
        return not all(isinstance(x, keras.layers.Layer) for x in operations)
    return name in RUN_OTHER_CODE and name != "ReversibleEmbedding"


def _is_of_keras(value: Any) -> bool:
    """Return True for what Keras defines, or the package in its place."""
    package = str(getattr(value, "__module__", "")).partition(".")[0]
    return package in ("keras", "keras_policy_ext")


def _passes_on(scope: keras.Layer | Note) -> bool:
    """Return True for a stock layer without weights, such as a resizing one."""
    # JAX interpolates by products with constants.
    return (
        isinstance(scope, keras.layers.Layer)
        and keras_class(scope).__name__ not in RUN_OTHER_CODE
        and runs_stock_call(scope)
        and not scope.weights
        and not walking.layers_directly_in(scope)
    )


def _in_floats(call: seams.ContractionCall) -> Any:
    """Multiply as a float8 contraction does, in floats, for a trace."""
    # The values do not matter, and a stored kernel has none.
    inputs, second = call.operands
    inputs = ops.cast(inputs, call.dtype)
    if call.weight is None:
        second = ops.cast(second, call.dtype)
    else:
        second = ops.zeros(call.shapes[1], call.dtype)
    contraction: Any = call.contraction
    if isinstance(contraction, contractions.Einsum):
        return ops.einsum(contraction.equation, inputs, second)
    return contraction.of(inputs, second)


@contextlib.contextmanager
def shapes_only(
    model: keras.Layer,
    called: Callable[..., Any],
    contracted: Callable[[seams.ContractionCall], Any],
) -> Iterator[None]:
    """In the block, calls of layers can be traced; on exit, they are undone.

    Args:
        model: The model.
        called: As for `calls.instead_of_each_call`.
        contracted: As for `seams.on_contraction`.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(keras.StatelessScope())
        stack.enter_context(keras.SymbolicScope())
        stack.enter_context(calls.instead_of_each_call(called))
        stack.enter_context(seams.on_contraction(contracted))
        stack.enter_context(undone(walking.layers_within(model)))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def check_built(layer: keras.Layer) -> None:
    """Raise a ValueError if Keras would make weights in a call of a layer."""
    if not layer.built and type(layer).build is not keras.Layer.build:
        raise ValueError(f"Layer {layer.name!r} is not built.")


def says_its_outputs(layer: keras.Layer) -> bool:
    """Return True if a class computes the shapes of its outputs."""
    names = ("compute_output_shape", "compute_output_spec")
    cls, base = type(layer), keras.Layer
    return any(getattr(cls, name) is not getattr(base, name) for name in names)


def is_array(value: Any) -> bool:
    """Return True for tensors, symbolic ones too, arrays and variables."""
    arrays = (keras.Variable, keras.KerasTensor, np.ndarray)
    return isinstance(value, arrays) or ops.is_tensor(value)


def described(x: Any) -> Any:
    """Return a new symbolic tensor like an array; other values themselves."""
    if not is_array(x):
        return x
    dtype = keras.backend.standardize_dtype(x.dtype)
    return keras.KerasTensor(tuple(x.shape), dtype)


def zeros(x: Any) -> Any:
    """Return zeros for a symbolic tensor; other values themselves."""
    is_symbolic = isinstance(x, keras.KerasTensor)
    return ops.zeros(x.shape, x.dtype) if is_symbolic else x


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments with which a model may be called, as symbolic tensors.

    Attributes:
        args: A structure with a `keras.KerasTensor` for each tensor.
        kwargs: The keyword arguments, in the same form.
        dtype: The dtype of all tensors; None for that of each tensor.
        filler: The size that replaces unknown sizes.
    """

    args: Any
    kwargs: Any
    dtype: str | None
    filler: int

    def of(self, samples: int) -> tuple[Any, Any]:
        """Return symbolic arguments for a batch of this many samples."""

        def filled(x: Any) -> Any:
            """Return an argument with numbers for the sizes that are None."""
            if not isinstance(x, keras.KerasTensor):
                return x
            sizes = [self.filler if n is None else n for n in x.shape[1:]]
            shape = (samples, *sizes) if x.shape else ()
            return keras.KerasTensor(shape, self.dtype or x.dtype)

        return keras.tree.map_structure(filled, (self.args, self.kwargs))

    @property
    def are_sizes_known(self) -> bool:
        """True if all sizes except the batch are known."""
        arguments = keras.tree.flatten((self.args, self.kwargs))
        return not any(
            None in x.shape[1:]
            for x in arguments
            if isinstance(x, keras.KerasTensor)
        )


# Tried in place of a size that is not known. A model may refuse small ones:
# its layers shorten images by a factor of 32, and audio by hundreds.
_FILLERS = (1, 32, 1024)


def guesses(model: keras.Layer) -> Iterator[Arguments]:
    """Yield guesses of a model's call arguments, the likeliest first."""
    if getattr(model, "inputs", None):
        structure = model.inputs
        if isinstance(model, keras.Sequential):
            structure = model.inputs[0]
        elif hasattr(model, "input"):
            structure = model.input
        args: Any = (structure,)
        kwargs: Any = {}
        dtypes: tuple[str | None, ...] = (None,)
    else:
        found = _arguments_of_build(model)
        if found is None:
            return
        args, kwargs = found
        # Shapes are recorded without dtypes; int32 is that of indices.
        dtypes = (None, "int32")
    if "training" in inspect.signature(model.call).parameters:
        kwargs = {**kwargs, "training": False}
    for filler in _FILLERS:
        for dtype in dtypes:
            inputs = Arguments(args, kwargs, dtype, filler)
            yield inputs
        if inputs.are_sizes_known:  # No filler makes a difference.
            return


def _arguments_of_build(layer: keras.Layer) -> tuple[Any, Any] | None:
    """Return call arguments of the shapes on which a layer was built."""
    config = keras.Layer.get_build_config(layer) or {}
    shapes = config.get("shapes_dict")
    if shapes is None:  # Of one input.
        shape = config.get("input_shape")
        return None if shape is None else ((_symbolic(layer, shape),), {})
    named = {
        name.removesuffix("_shape"): _symbolic(layer, shape)
        for name, shape in shapes.items()
        # The path is added by `BuiltUnderSavedPath`.
        if shape is not None and name != "path"
    }
    if list(named) == ["input"]:  # Its argument may have another name.
        return (named["input"],), {}
    return (), named


def _symbolic(layer: keras.Layer, shapes: Any) -> Any:
    """Replace each shape by a symbolic tensor; TypeError for anything else."""
    if not isinstance(shapes, (dict, list, tuple)):
        raise TypeError(f"{shapes!r} is no shape")
    if isinstance(shapes, dict):
        return {name: _symbolic(layer, each) for name, each in shapes.items()}
    if all(size is None or isinstance(size, int) for size in shapes):
        return keras.KerasTensor(tuple(shapes), layer.compute_dtype)
    return [_symbolic(layer, each) for each in shapes]
