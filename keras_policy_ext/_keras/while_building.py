"""Layers that are changed while they are built, and as soon as they are."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

from keras_policy_ext._keras import versions

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

    def post_build(stock: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
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

    def add_weight(stock: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
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

    def init(stock: Any, variable: Any, *args: Any, **kwargs: Any) -> None:
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

        def method(layer: Any, *args: Any, **kwargs: Any) -> Any:
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
