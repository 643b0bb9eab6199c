"""Calls of layers: masks, shapes, scopes; and hooks while layers are built."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import keras

from keras_policy_ext._keras import Stock, versions

# A method of a class is replaced for all threads, and acts in one.
_REPLACED = threading.RLock()

_BUILT = "_post_build"
"""The method that Keras calls once a layer has its weights (3.12 to 3.16)."""


@contextlib.contextmanager
def after_each_build(
    change: Callable[[keras.Layer], None],
    replaces: Callable[[keras.Layer, str | None], bool],
) -> Iterator[None]:
    """In the block, call `change` with each layer that this thread builds.

    So a model that is created in the block never holds more than one unchanged
    layer. The hook is private (`_post_build`). Weights for which `replaces`
    returns True, for a layer and a name, are zeros until then.
    """

    def post_build(
        stock: Stock, layer: keras.Layer, *args: Any, **kwargs: Any
    ) -> None:
        """Build the layer as Keras does, then change it."""
        stock(layer, *args, **kwargs)
        change(layer)

    def add_weight(
        stock: Stock, layer: keras.Layer, *args: Any, **kwargs: Any
    ) -> Any:
        """Add a weight as Keras does; zeros if it is to be replaced."""
        # A positional argument is the shape, or the initializer: leave these.
        if not args and replaces(layer, kwargs.get("name")):
            kwargs["initializer"] = "zeros"
        return stock(layer, *args, **kwargs)

    with in_place_of(_BUILT, post_build), in_place_of("add_weight", add_weight):
        yield


@contextlib.contextmanager
def before_each_variable(
    check: Callable[[tuple[Any, ...]], None],
) -> Iterator[None]:
    """In the block, call `check` with the shape of each variable to be made.

    It is called before memory is allocated, and not for variables made from an
    array; it raises to refuse the shape. Keras does not limit what a config
    may request (keras 3.0 to 3.15).
    """

    def check_and_init(
        stock: Stock, variable: keras.Variable, *args: Any, **kwargs: Any
    ) -> None:
        """Check the shape, then make the variable as Keras does."""
        # The arguments of a variable are `initializer`, `shape` and others.
        shape = args[1] if len(args) > 1 else kwargs.get("shape")
        if isinstance(shape, int):
            shape = (shape,)
        if shape is not None:
            check(tuple(shape))
        stock(variable, *args, **kwargs)

    with in_place_of("__init__", check_and_init, keras.Variable):
        yield


@contextlib.contextmanager
def in_place_of(
    name: str, function: Callable[..., Any], cls: Any = keras.Layer
) -> Iterator[None]:
    """In the block, replace a method by a function that gets the original.

    By default it is a method of all layers. Other threads call the original.
    """
    thread = threading.get_ident()
    with _REPLACED:
        # `own` is None for a method that the class inherits.
        stock, own = getattr(cls, name, None), vars(cls).get(name)
        if stock is None:
            owner = cls.__name__
            raise versions.missing(f"{owner}.{name}", f"a hook around {owner}")

        @functools.wraps(stock)  # Its signature too: others read that.
        def method(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
            """Call `function` in this thread, the original in others."""
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


def training_of_call() -> bool | None:
    """Return the `training` argument of the layer call in progress, or None.

    This is for layers whose `call` has no such argument. It is in Keras's call
    context (keras 3.0 to 3.15). Without it, any gradient observes amaxes.
    """
    if _global_state is None:
        return None
    context = _global_state.get_global_attribute("current_call_ctx")
    if context is None:
        return None
    if hasattr(context, "get_value"):  # keras >= 3.11
        return context.get_value("training")
    return getattr(context, "training", None)


_STATELESS_CALL_ENTERS = (versions.number() or versions.NEWEST) >= (3, 16)
"""Whether `stateless_call` enters a call context itself (keras 3.16 on)."""


def root_of_call() -> Any:
    """Return an object that identifies the model call in progress, or None.

    If the user called a model, it is the call context that `training_of_call`
    reads. In a `stateless_call`, which enters none before keras 3.16, it is
    the scope of that call. None for a layer that is called alone.
    """
    if _global_state is None:
        return None
    context = _global_state.get_global_attribute("current_call_ctx")
    if context is None:
        return None
    if isinstance(getattr(context, "entry_layer", None), keras.Model):
        return context
    if _STATELESS_CALL_ENTERS:
        return None
    return _global_state.get_global_attribute("stateless_scope")


def parameter_of_call(variable: Any) -> Any:
    """Return the tensor that PyTorch lists for a variable, or None.

    It is listed by path in the model that the user called (`_torch_params`,
    keras 3.0 to 3.16), where `torch.func.functional_call` puts other tensors.
    """
    layer = entry_layer()
    modules = {} if layer is None else vars(layer).get("_modules", {})
    listed = modules.get("_torch_params", {})
    return listed.get(getattr(variable, "path", None))


def entry_layer() -> Any:
    """Return the layer that the user called, or None."""
    if _global_state is None:
        return None
    context = _global_state.get_global_attribute("current_call_ctx")
    return getattr(context, "entry_layer", None)


def are_shapes_alone_wanted() -> bool:
    """Return True if Keras is computing output shapes and dtypes only."""
    # On PyTorch, for example, it calls a model with ones before the first step
    # of `fit`, if the model has attention in 16 bits (keras 3.0 to 3.15). It
    # does so in a `keras.SymbolicScope`. That class is public, but not whether
    # the scope is entered. If that is unknown, False, which costs only time.
    entered = getattr(_symbolic_scope, "in_symbolic_scope", None)
    return False if entered is None else bool(entered())


def instead_of_each_call(
    function: Callable[..., Any],
) -> AbstractContextManager[None]:
    """In the block, replace each layer call of this thread by `function`.

    It is called as `function(stock, layer, *args, **kwargs)`. A direct use of
    `call`, as in `TimeDistributed`, is not replaced (keras 3.0 to 3.15).
    """
    return in_place_of("__call__", function)


def autocast_scope(dtype: str | None) -> AbstractContextManager[object]:
    """Return Keras's scope in which autocast variables are read in a dtype."""
    # With None they are read in their own dtype. Layers enter it around their
    # `call`. It has no public name (keras 3.0 to 3.15).
    if _AutocastScope is None:
        what = "keras.src.backend.common.AutocastScope"
        feature = "reading variables in another dtype than that of the call"
        raise versions.missing(what, feature)
    return _AutocastScope(dtype)


def rematerialize_with_outer(layer: keras.Layer) -> None:
    """Turn off rematerialization of a layer that an outer layer rematerializes.

    If all of the outer layer is rematerialized, doing it again inside saves
    nothing. On TensorFlow it also fails for a stock layer that is called with
    keyword arguments, such as a softmax with its mask (keras 3.8 to 3.15).
    """
    mode = getattr(layer, "_remat_mode", None)
    if getattr(mode, "mode", None) == "full":
        layer._remat_mode = None


def rematerialize_nothing(layer: keras.Layer) -> None:
    """Turn off rematerialization of a layer whose call is only traced."""
    # On TensorFlow a graph with it fails for a stock layer that is called with
    # keyword arguments (keras 3.8 to 3.15).
    if getattr(layer, "_remat_mode", None) is not None:
        layer._remat_mode = None
