"""Which class is the float8 form of which stock layer."""

from __future__ import annotations

import inspect
import threading
from typing import Any, TypeVar

import keras

from keras_policy_ext._keras import saving_hooks

_STOCK: set[type] = set()
_FORMS: dict[type, type] = {}
_ORIGINALS: dict[type, type] = {}

# Threads that convert models of one class at a time get one form.
_MAKING_A_FORM = threading.Lock()

LayerClass = TypeVar("LayerClass", bound=type)


def drop_in(cls: LayerClass) -> LayerClass:
    """Register a class as the float8 form of the stock layer of its name.

    It gets the stock signature, and is registered for saving.

    Args:
        cls: A class that derives, last, from the stock layer of the same
            name; from `Float8Mixin` first if it has kernels itself.

    Returns:
        The class.
    """
    # Not from keras.layers: GroupedQueryAttention has another name there.
    stock = next(b for b in cls.__mro__[1:] if b.__name__ == cls.__name__)
    documented: Any = cls
    documented.__signature__ = inspect.signature(stock)
    _STOCK.add(stock)
    _FORMS[stock] = cls
    _ORIGINALS[cls] = stock
    register = keras.saving.register_keras_serializable("keras_policy_ext")
    return register(cls)


def drop_ins() -> dict[type, Any]:
    """Stock layer classes and the drop-in of each."""
    return {stock: _FORMS[stock] for stock in _STOCK}


def drop_in_of(cls: type) -> Any:
    """The drop-in of the stock class that a class is, or derives from."""
    return next((_FORMS[base] for base in cls.__mro__ if base in _STOCK), None)


def form_of(cls: type) -> type | None:
    """The float8 form of a class of layers.

    A subclass of a stock layer gets a class of its own: the subclass with
    the drop-in put behind it, so that its `super().call(...)` is the float8
    one; where it has a `call`, it must say that it goes on to that one, by
    `float8_calls_super = True`. Files go on naming the subclass itself.

    Args:
        cls: A class of layers.

    Returns:
        The class itself if it is a float8 form, None if there is none.

    Raises:
        TypeError: If a subclass replaces what the drop-in computes.
    """
    form = drop_in_of(cls)
    if form is None or form in cls.__mro__:
        return None if form is None else cls
    if cls in _FORMS:
        return _FORMS[cls]
    stock = _ORIGINALS[form]
    replaced = _replaced(cls, stock)
    if replaced:
        raise TypeError(
            f"its class {cls.__name__} has {replaced} of its own, and may "
            f"not compute what keras.layers.{stock.__name__} does; derive it "
            "from Float8Mixin and contract with float8_einsum, or, if its "
            "`call` goes on to `super().call`, set `float8_calls_super = "
            "True` in the class"
        )
    with _MAKING_A_FORM:
        return _FORMS[cls] if cls in _FORMS else _new_form(cls, stock)


def _new_form(cls: type, stock: type) -> type:
    namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    form = type(cls.__name__, (cls, _FORMS[stock]), namespace)
    form.__qualname__ = cls.__qualname__
    saving_hooks.serialize_as(form, cls)
    _ORIGINALS[form] = cls
    _FORMS[cls] = form
    return form


def original_of(cls: type) -> type | None:
    """The class that a float8 form stands for; None for any other class."""
    return _ORIGINALS.get(cls)


def _replaced(cls: type, stock: type) -> str | None:
    """The name of what a subclass computes in another way, if it does.

    A method may go on to the one that it overrides if the form has one too,
    and its class says so; a float8 call does without the others, and so
    without what goes on to them.
    """
    form: Any = _FORMS[stock]
    own = form.__mro__[: form.__mro__.index(stock)]
    for base in cls.__mro__[: cls.__mro__.index(stock)]:
        for name in getattr(form, "float8_replaces", ()):
            if name not in vars(base):
                continue
            called = any(callable(vars(part).get(name)) for part in own)
            if not (called and vars(base).get("float8_calls_super")):
                return f"a `{name}`"
    return None
