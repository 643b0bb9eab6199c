"""The registry of float8 classes that replace stock layer classes.

A *form* is the float8 class of a stock class or of a user's class. A *drop-in*
is that of a stock class, and has its name.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any, TypeVar

import keras

from keras_policy_ext._keras import saving_hooks

_STOCK: set[type] = set()  # The stock classes that have a drop-in.
_FORMS: dict[type, type] = {}  # The form of each stock class or user's class.
_ORIGINALS: dict[type, type] = {}  # The inverse.

# Threads that convert models of one class at a time get one form.
_MAKING_A_FORM = threading.Lock()

LayerClass = TypeVar("LayerClass", bound=type)


def drop_in(cls: LayerClass) -> LayerClass:
    """Register a class as the float8 form of the stock layer of the same name.

    The last base of the class is that stock layer, and the first one is
    `Float8Mixin` if it has kernels itself. It gets the signature of the stock
    layer, and is registered for saving.
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
    """Return a dict from stock layer classes to their float8 classes."""
    return {stock: _FORMS[stock] for stock in _STOCK}


def drop_in_of(cls: type) -> Any:
    """Return the float8 class of a stock class, or of a subclass; or None."""
    return next((_FORMS[base] for base in cls.__mro__ if base in _STOCK), None)


def form_of(cls: type) -> type | None:
    """Return the float8 class of a layer class, perhaps itself, or None.

    For a subclass of a stock layer, a class is created: the subclass with the
    drop-in as a further base, so that its `super().call(...)` runs in float8.
    If the subclass has a `call`, it must declare `float8_calls_super = True`.
    Files still name the subclass itself.

    Raises:
        TypeError: If a subclass overrides a method that the drop-in computes.
    """
    form = drop_in_of(cls)
    if form is None or form in cls.__mro__:
        return None if form is None else cls
    if cls in _FORMS:
        return _FORMS[cls]
    stock = _ORIGINALS[form]
    replaced = _override_skipped_in_float8(cls, stock)
    if replaced:
        raise TypeError(
            f"its class {cls.__name__} has {replaced} of its own, and may "
            f"not compute what keras.layers.{stock.__name__} does; derive it "
            "from Float8Mixin and contract with float8_einsum, or, if its "
            "`call` goes on to `super().call`, set `float8_calls_super = "
            "True` in the class"
        )
    with _MAKING_A_FORM:
        if cls not in _FORMS:
            _FORMS[cls] = new_form(cls, _FORMS[stock])
        return _FORMS[cls]


def new_form(cls: type, base: type, **namespace: Any) -> type:
    """Return a subclass of a user's class with a float8 class as further base.

    Files name the class of the user. `namespace` has further attributes.
    """
    copied = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    form = type(cls.__name__, (cls, base), {**copied, **namespace})
    form.__qualname__ = cls.__qualname__
    saving_hooks.serialize_as(form, cls)
    _ORIGINALS[form] = cls
    return form


def original_of(cls: type) -> type | None:
    """Return the class that a float8 class (form) replaces, or None."""
    return _ORIGINALS.get(cls)


def _override_skipped_in_float8(cls: type, stock: type) -> str | None:
    """Return, in words, an override that a float8 call would skip, or None.

    `cls` is a user's subclass of the layer class `stock`.
    """
    # An override may call `super()` if the form has the method too and the
    # class declares `float8_calls_super`.
    form: Any = _FORMS[stock]
    float8_bases = form.__mro__[: form.__mro__.index(stock)]
    for base in cls.__mro__[: cls.__mro__.index(stock)]:
        for name in getattr(form, "float8_replaces", ()):
            if name not in vars(base):
                continue
            is_method = any(callable(vars(x).get(name)) for x in float8_bases)
            if not (is_method and vars(base).get("float8_calls_super")):
                return f"a `{name}`"
    return None
