"""Calls of layers: masks, shapes, scopes; and hooks while layers are built."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import keras
from keras import ops

from keras_policy_ext._keras import versions
from keras_policy_ext._types import Tensor

# A method of a class is replaced for all threads, and acts in one.
_REPLACED = threading.RLock()


_BUILT = "_post_build"
"""What Keras calls once a layer has its weights (keras 3.12 to 3.16)."""


def tells_what_is_built() -> bool:
    """Return whether this Keras has what `after_each_build` needs."""
    return hasattr(keras.Layer, _BUILT)


@contextlib.contextmanager
def after_each_build(change: Callable[[keras.Layer], None]) -> Iterator[None]:
    """Call a function with each layer that this thread builds, inner first.

    A model that is made inside then never holds more than one layer as it was
    built. There is a private hook only. Expires with a public one.

    Raises:
        ImportError: If layers of this Keras do not tell that they are built.
    """

    def post_build(
        stock: Any, layer: keras.Layer, *args: Any, **kwargs: Any
    ) -> None:
        stock(layer, *args, **kwargs)
        change(layer)

    with in_place_of(_BUILT, post_build):
        yield


@contextlib.contextmanager
def without_initial_values(
    wanted: Callable[[keras.Layer, str | None], bool],
) -> Iterator[None]:
    """Do not compute initial values of weights that this thread adds.

    They are zeros that on PyTorch take no memory and cannot be assigned to:
    for weights that are replaced once the layer is built. Memory that is
    taken and given back for each layer would stay with the process, in holes
    that the next layer does not fit into.

    Args:
        wanted: Whether it is so for the weight of this name of a layer.
    """

    def add_weight(
        stock: Any, layer: keras.Layer, *args: Any, **kwargs: Any
    ) -> Any:
        if not args and wanted(layer, kwargs.get("name")):
            kwargs["initializer"] = _zeros
        return stock(layer, *args, **kwargs)

    with in_place_of("add_weight", add_weight):
        yield


def _zeros(shape: tuple[int, ...], dtype: Any = None) -> Any:
    return ops.broadcast_to(ops.zeros((), dtype), shape)


@contextlib.contextmanager
def before_each_variable(
    check: Callable[[tuple[Any, ...]], None],
) -> Iterator[None]:
    """Call a function with the shape of each variable that this thread makes.

    Before it takes memory; not of those that are made of an array. Keras has
    no limit for what a config may ask for (keras 3.0 to 3.15), and expires
    this when it compares a config with the weights beside it.

    Args:
        check: Of the shape; raises to refuse.
    """

    def init(
        stock: Any, variable: keras.Variable, *args: Any, **kwargs: Any
    ) -> None:
        shape = args[1] if len(args) > 1 else kwargs.get("shape")
        if isinstance(shape, int):
            shape = (shape,)
        if shape is not None:
            check(tuple(shape))
        stock(variable, *args, **kwargs)

    with in_place_of("__init__", init, keras.Variable):
        yield


@contextlib.contextmanager
def in_place_of(
    name: str, function: Callable[..., Any], cls: Any = keras.Layer
) -> Iterator[None]:
    """Let a method of a class be another one, which gets the stock one.

    By default of all layers.

    Raises:
        ImportError: If there is none of this name.
    """
    thread = threading.get_ident()
    with _REPLACED:
        stock, own = getattr(cls, name, None), vars(cls).get(name)
        if stock is None:
            raise versions.missing(
                f"{cls.__name__}.{name}", f"a hook around {cls.__name__}"
            )

        def method(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return stock(layer, *args, **kwargs)
            return function(stock, layer, *args, **kwargs)

        setattr(cls, name, method)
        try:
            yield
        finally:
            if own is None:
                delattr(cls, name)
            else:
                setattr(cls, name, own)


try:
    from keras.src.backend.common import global_state as _global_state
except ImportError:  # Keras has moved it: the public API has to do.
    _global_state = None

try:
    from keras.src.backend.common import AutocastScope as _AutocastScope
except ImportError:  # Keras has moved it: see `autocast_scope`.
    _AutocastScope = None

try:
    from keras.src.backend.common import symbolic_scope as _symbolic_scope
except ImportError:  # Keras has moved it: see `are_shapes_alone_wanted`.
    _symbolic_scope = None

try:
    from keras.src.backend.common import masking as _masking
except ImportError:  # Keras has moved it: see `keep_mask`.
    _masking = None


PARTS_OF_LSTM_STEPS = (
    "_compute_carry_and_output",
    "_compute_carry_and_output_fused",
)
"""Methods that `LSTMCell.call` consists of (keras 3.0 to 3.15).

A subclass that overrides one computes otherwise, and has no float8 form.
Where they are gone, none overrides them. Expires when they are public.
"""


def training_of_call() -> bool | None:
    """The `training` argument of the layer call that is under way, or None.

    For layers whose `call` has no such argument; Keras keeps it in the call
    context (keras 3.0 to 3.15) and offers no public way to read it. Where the
    context is gone, None: amaxes are then observed where a gradient is taken.
    """
    if _global_state is None:
        return None
    context = _global_state.get_global_attribute("current_call_ctx")
    if context is None:
        return None
    if hasattr(context, "get_value"):  # keras >= 3.11
        return context.get_value("training")
    return getattr(context, "training", None)


def root_of_call() -> Any:
    """Return an object that all layers share in one call of a model.

    The call context, from where `training_of_call` has it, if the user
    called a model; else the scope of a `stateless_call`, which enters none.
    One object for each such call; None for a layer that is called alone, or
    where Keras keeps these elsewhere. Expires with a public way to ask.
    """
    if _global_state is None:
        return None
    context = _global_state.get_global_attribute("current_call_ctx")
    if context is None:
        return None
    if isinstance(getattr(context, "entry_layer", None), keras.Model):
        return context
    return _global_state.get_global_attribute("stateless_scope")


def are_shapes_alone_wanted() -> bool:
    """Return True if Keras computes outputs to see their shapes and dtypes.

    As it does of ones before the first step of `fit` on PyTorch, where a
    model has attention in 16 bits (keras 3.0 to 3.15). The scope it does so
    in, `keras.SymbolicScope`, is public; that it is entered, is not. Where
    nobody says, False, which costs time alone.
    """
    entered = getattr(_symbolic_scope, "in_symbolic_scope", None)
    return False if entered is None else bool(entered())


def is_in_a_call() -> bool:
    """Return True if the call of a layer is under way on this thread.

    From the same context as `training_of_call`; where that is gone, True.
    Expires with a public way to ask.
    """
    if _global_state is None:
        return True
    found = _global_state.get_global_attribute("current_call_ctx")
    return found is not None


@contextlib.contextmanager
def around_each_call(
    scope: Callable[[keras.Layer], AbstractContextManager[object]],
) -> Iterator[None]:
    """Call each layer that this thread calls in a scope of its own.

    As for `instead_of_each_call`.
    """

    def call(stock: Any, layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        with scope(layer):
            return stock(layer, *args, **kwargs)

    with instead_of_each_call(call):
        yield


def instead_of_each_call(
    function: Callable[..., Any],
) -> AbstractContextManager[None]:
    """Call a function where this thread calls a layer.

    Not where a layer is asked for its `call` alone, as `TimeDistributed` asks
    the layer in it. There is no public hook (keras 3.0 to 3.15): expires with
    one.

    Args:
        function: Called as `function(stock, layer, *args, **kwargs)`, where
            `stock(layer, *args, **kwargs)` is the call that Keras makes.
    """
    return in_place_of("__call__", function)


def autocast_scope(dtype: str | None) -> AbstractContextManager[object]:
    """Keras's context manager under which variables are read in a dtype.

    Inside, variables that autocast are handed out in `dtype`; None: in their
    own. Layers enter it around their `call`; there is no public name for it
    (keras 3.0 to 3.15). Expires when there is one.

    Raises:
        ImportError: If this Keras keeps it elsewhere.
    """
    if _AutocastScope is None:
        raise versions.missing(
            "keras.src.backend.common.AutocastScope",
            "reading variables in another dtype than that of the call",
        )
    return _AutocastScope(dtype)


def stored_autocast_scope() -> object:
    """The `autocast_scope` that this thread is in, None if in none.

    Read off Keras's thread-local state, which has no public form (keras 3.0
    to 3.15). Where that is gone, None: a layer that is not mixed then leaves
    the scope that it is called in as it is.
    """
    if _global_state is None:
        return None
    return _global_state.get_global_attribute("autocast_scope")


def store_autocast_scope(scope: object) -> None:
    """Put this thread into an `autocast_scope`; None: into none.

    Raises:
        ImportError: If this Keras keeps it elsewhere.
    """
    if _global_state is None:
        raise versions.missing(
            "keras.src.backend.common.global_state", "an autocast scope"
        )
    _global_state.set_global_attribute("autocast_scope", scope)


class OwnArgumentConversion:
    """A layer that converts the arguments of its call itself.

    Keras's `__call__` casts every floating argument unless the layer says
    `_convert_input_args = False`, as Keras's preprocessing layers do (keras
    3.0 to 3.15); per argument there is nothing to say. Whatever a layer
    says, Keras is told no here, and `converts_arguments` keeps the answer.
    Where Keras no longer asks, it casts all arguments once more. Expires
    when a layer can say which arguments are cast.
    """

    @property
    def converts_arguments(self) -> bool:
        """Return True if arguments are to be converted at all."""
        return bool(self.__dict__.get("_converts_arguments", True))

    @property
    def _convert_input_args(self) -> int:
        # Not False: TensorFlow skips the setter for the object that is there.
        return 0

    @_convert_input_args.setter
    def _convert_input_args(self, value: bool) -> None:
        self.__dict__["_converts_arguments"] = bool(value)


def keep_mask(old: Tensor, new: Tensor) -> Tensor:
    """Give a tensor the Keras mask of the one that it was cast from; return it.

    As Keras does when it casts arguments. Masks are attributes of tensors
    without public access (`masking`, keras 3.4 to 3.16); where the module is
    gone, the mask is lost, which a warning says once.
    """
    if _masking is None and new is not old:
        versions.warn_of_missing(
            "keras.src.backend.common.masking",
            "A mask is lost where a layer with AutocastMixin casts its "
            "argument. Call the layer with `mask=`.",
        )
    elif new is not old:
        mask = _masking.get_keras_mask(old)
        if mask is not None:
            _masking.set_keras_mask(new, mask)
    return new


def rematerialize_with_outer(layer: keras.Layer) -> None:
    """Let a layer be rematerialized with the one that it is in, not again.

    Where all of the outer layer is, to do it again inside saves nothing, and
    on TensorFlow a stock layer that is called with keyword arguments, such as
    a softmax with its mask, cannot be (keras 3.8 to 3.15). Expires when Keras
    rematerializes functions with keyword arguments there.
    """
    mode = getattr(layer, "_remat_mode", None)
    if getattr(mode, "mode", None) == "full":
        layer._remat_mode = None


class _WithCell:
    """An RNN layer as its own `inner_loop` sees it, but for the cell."""

    def __init__(self, layer: keras.layers.RNN, cell: Callable[..., object]):
        self._layer = layer
        self.cell = cell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def run_recurrent_loop(
    layer: keras.layers.RNN,
    step: Callable[..., object],
    inputs: Tensor,
    initial_state: list[Tensor],
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`keras.layers.RNN.inner_loop` of a layer around another step.

    There is no public loop over time steps with masks, and the one of `RNN`
    calls `self.cell`; so it is called with a stand-in for the layer
    (keras 3.0 to 3.15). Where it comes to need more than attributes, it
    raises, and float8 RNN layers with it. Expires with a public `ops.rnn`.

    Args:
        layer: An RNN layer.
        step: Of (inputs of a step, states) to (outputs, new states).
        inputs: (batch, steps, ...).
        initial_state: A list of states.
        mask: None, or boolean (batch, steps).

    Returns:
        The last outputs, all outputs, and the last states.
    """
    return keras.layers.RNN.inner_loop(
        _WithCell(layer, step), inputs, initial_state, mask
    )
